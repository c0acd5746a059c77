"""Loads a stored model as a config, parameters and functions of this package.

The model itself declares its parameters and their shapes; the table of its family says
where in the file they are. Missing and superfluous arrays, and wrong shapes, are errors
that name the array.
"""

import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import arrays, checks, fields, models
from mha_haiku.core.modules import anatomy
from mha_haiku.interop import sources
from mha_haiku.interop.families import FAMILIES, name_tables
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

Params = dict[str, dict[str, jax.Array]]


class Imported(NamedTuple):
    """A model from elsewhere.

    Example:
      >>> _ = mh.interop.save("my_model", config, params)
      >>> config, params, tokenizer, model = mh.interop.load("my_model")
      >>> model, tokenizer is None
      (Model(causal: 2 layers of 2 heads, model size 45, learned positions), True)
    """

    config: models.ModelConfig
    params: Params
    tokenizer: tokenization.Tokenizer | None  # None if it has none
    model: models.Model  # as pure functions


class Sizes(NamedTuple):
    """The arguments of `models.build` next to the config; see there.

    Example:
      >>> sizes = mh.interop.Sizes(num_tokens=13, feature_size=None, num_classes=13)
      >>> mh.models.build(config, **sizes._asdict())
      Model(causal: 2 layers of 2 heads, model size 45, learned positions)
    """

    num_tokens: int | None
    feature_size: int | None
    num_classes: int


def load(source: str | os.PathLike | sources.Source, *, dtype: Any = None) -> Imported:
    """Loads a model of another library: config, parameters, tokenizer, functions.

    Args:
      source: A folder in the layout of the hub (config.json, model.safetensors or its
        shards, tokenizer.json), as `save` writes it, a `.safetensors` file in one, a
        `.gguf` file, `package:NAME` of an installed Python package that holds either,
        or a name on the hub, `owner/name`, whose safetensors are downloaded; or a
        result of `sources.find`.
      dtype: The dtype of the parameters, as "bfloat16". Defaults to float32. Files of
        float16 and bfloat16 load as either. Scales of Gemma's norms, which files store
        minus 1, are float32 at least.

    Raises:
      ConfigError: If there is no such model, its family or an option of it is not
        supported, or its arrays do not fit its config; the message names them.
      ValueError: If `dtype` is not floating-point.

    Example:
      >>> folder = mh.interop.save("my_model", config, params)
      >>> imported = mh.interop.load(folder, dtype="bfloat16")
      >>> imported.params["logits"]["w"].dtype.name
      'bfloat16'
    """
    dtype = jnp.dtype(np.float32 if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}.")
    origin = source if isinstance(source, sources.Source) else sources.find(source)
    family = None
    if origin.config.get("model_type") == OWN:
        config, sizes = _read_own(origin.config)
        stored, head = dict(origin.arrays), name_tables.OutputHead(OWN, {})
    else:
        family = family_of(origin.config)
        stored = named(family, origin)
        head = head_of(family, origin.config)
        config, sizes = read_fields(family, head, origin.config)
        config = config.replace(origin=json.dumps(origin.config))
    # Before the arrays are read: a config may be refused as a whole.
    model = models.build(config, **sizes._asdict())
    expected = flat(shapes(config, sizes))
    rows = [name_tables.row(name, name) for name in expected]
    if family is not None:
        rows = list(rows_of(family, head, config, expected))
    needed = {name for row in rows for name in row.theirs}
    _drop_copies(head, needed, stored, config.output.tied)
    _check_names(origin, head, needed, stored)
    params: Params = {}
    for each in rows:
        _check_shapes(origin, each, expected, stored)
        whole = [stored[name].read() for name in each.theirs]
        results = each.change.to_ours(whole)
        kept = jnp.promote_types(dtype, np.float32) if each.change.is_wide else dtype
        for name, x in zip(each.ours, results, strict=True):
            module, _, parameter = name.rpartition("/")
            # A copy, as the file that x may be a view of can change.
            array = jnp.array(np.asarray(x, kept))
            params.setdefault(module, {})[parameter] = array
    tokenizer = None
    if sizes.num_tokens is not None:
        tokenizer = origin.read_tokenizer(sizes.num_tokens)
    is_read = isinstance(tokenizer, tokenization.Pretrained)
    if is_read and (beyond := tokenizer.out_of_range):
        _logger.warning(
            f"{origin.name} has a tokenizer of {beyond[-1] + 1} tokens, and a model of "
            f"{sizes.num_tokens}: texts that need one of the others, as "
            f"{tokenizer.label(beyond[0])!r}, are refused."
        )
    return Imported(config, params, tokenizer, model)


OWN = "mha_haiku"  # `model_type` of models that have no other layout


def sizes_of(params: Mapping[str, Mapping[str, Any]]) -> Sizes:
    """Reads the vocabulary or width of the inputs, and the number of classes.

    Example:
      >>> mh.interop.sizes_of(params)
      Sizes(num_tokens=13, feature_size=None, num_classes=13)
    """
    num_tokens = feature_size = None
    if "embeddings" in params["embedding"]:
        num_tokens = params["embedding"]["embeddings"].shape[0]
    else:
        feature_size = params["embedding"]["w"].shape[0]
    num_classes = num_tokens or 1
    if "decoder_embedding" in params:
        num_classes = params["decoder_embedding"]["embeddings"].shape[0]
    for x in params.get("logits", {}).values():  # tied logits have a bias at most
        num_classes = x.shape[-1]
    return Sizes(num_tokens, feature_size, num_classes)


@checks.user_mistakes()
def _read_own(ours: Mapping[str, Any]) -> tuple[models.ModelConfig, Sizes]:
    try:
        sizes, model = Sizes(**ours["sizes"]), dict(ours["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config.json lacks sizes or a model: {error}.") from None
    if (sizes.num_tokens is None) == (sizes.feature_size is None):
        raise ValueError("config.json's sizes must have num_tokens or feature_size.")
    for name, neutral in models.GONE.items():
        if model.get(name, ...) == neutral:
            del model[name]
    return _config(model), _checked(sizes)


def named(
    family: name_tables.Family, source: sources.Source
) -> dict[str, arrays.Stored]:
    """Collects the arrays of a file, except buffers, by the names that rows have."""
    of_heads = {
        name for head in family.heads for row in head.rows for name in row.theirs
    }
    of_heads |= {name for head in family.heads for name in head.copies}
    result: dict[str, arrays.Stored] = {}
    has_prefix = any(name.startswith(family.prefix) for name in source.arrays)
    for name, array in source.arrays.items():
        if name.endswith(family.buffers):
            continue
        for before, after in family.renamed.items():
            name = name.replace(before, after)
        if not has_prefix and name not in of_heads:
            name = family.prefix + name
        if name in result:
            raise checks.ConfigError(f"{source.name} has {name} under two names.")
        result[name] = array
    return result


@checks.user_mistakes()
def head_of(
    family: name_tables.Family, theirs: Mapping[str, Any]
) -> name_tables.OutputHead:
    """Finds the head named by config.json."""
    names = theirs.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    heads = {head.architecture: head for head in family.heads}
    return heads[checks.choice("config.json's architectures", name, heads)]


@checks.user_mistakes()
def family_of(theirs: Mapping[str, Any]) -> name_tables.Family:
    """Finds the family that config.json names."""
    name = "config.json's family of models (model_type)"
    return FAMILIES[checks.choice(name, theirs.get("model_type"), FAMILIES)]


def read_fields(
    family: name_tables.Family,
    head: name_tables.OutputHead,
    theirs: Mapping[str, Any],
) -> tuple[models.ModelConfig, Sizes]:
    """Reads a model's config and sizes from config.json."""
    theirs = name_tables.checked(family, head, theirs)
    values = {**dict.fromkeys(Sizes._fields), **family.fields, **head.fields}
    for rule in (*family.rules, *head.rules):
        values |= rule.read(theirs)
    sizes = Sizes(**{name: values.pop(name) for name in Sizes._fields})
    if sizes.num_classes is None:
        sizes = sizes._replace(num_classes=sizes.num_tokens or 1)
    return _config(values), _checked(sizes)


@checks.user_mistakes()
def _checked(sizes: Sizes) -> Sizes:
    for name, size in sizes._asdict().items():
        if size is not None or name == "num_classes":
            checks.integer_in(f"config.json's {name}", size, 1, 2**31 - 1)
    return sizes


def _config(values: Mapping[str, Any]) -> models.ModelConfig:
    config = models.ModelConfig().replace(**fields.nested(values))
    models.check(config)
    return config


def rows_of(
    family: name_tables.Family,
    head: name_tables.OutputHead,
    config: models.ModelConfig,
    names: Collection[str],
) -> Iterator[name_tables.Row]:
    """Yields the rows of a model with parameters of these names, with whole names."""
    missing = set(names)
    for each in name_tables.all_rows(family, head, config.num_layers):
        if missing.issuperset(each.ours):
            missing -= set(each.ours)
            yield each
    if missing:
        raise RuntimeError(f"{family.name} has no row for {sorted(missing)}.")


def shapes(config: models.ModelConfig, sizes: Sizes) -> Any:
    """Finds the tree of shapes of the parameters of a config's model."""
    model = models.build(config, **sizes._asdict())
    if model.scanned is not None and config.num_layers > 1:
        # The layers are alike, and one is traced for all.
        one_layer = shapes(config.replace(num_layers=1), sizes)
        parts = [(anatomy.layer_of(module), module) for module in one_layer]
        return {
            module if layer is None else str(layer._replace(index=i)): one_layer[module]
            for layer, module in parts
            for i in range(1 if layer is None else config.num_layers)
        }
    tokens = inputs = jax.ShapeDtypeStruct((1, 1), np.int32)
    if sizes.num_tokens is None:
        inputs = jax.ShapeDtypeStruct((1, 1, sizes.feature_size), np.float32)
    read = (None, tokens) if models.num_decoder_layers(config) else ()
    return jax.eval_shape(model.init, jax.random.key(0), inputs, *read)


def flat(params: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Flattens parameters to names that join module and parameter."""
    leaves = hk.data_structures.traverse(params)
    return {f"{module}/{name}": x for module, name, x in leaves}


def _drop_copies(
    head: name_tables.OutputHead,
    needed: set[str],
    stored: dict[str, arrays.Stored],
    is_tied: bool,
) -> None:
    """Removes arrays that repeat another, as a model ties them."""
    for copy, of in head.copies.items():
        if copy not in stored or copy in needed:
            continue
        if not is_tied:  # it is what transformers reads
            stored[of] = stored.pop(copy)
        elif of in stored:
            del stored[copy]


def _check_names(
    source: sources.Source,
    head: name_tables.OutputHead,
    needed: set[str],
    stored: Mapping[str, arrays.Stored],
) -> None:
    missing = [name for name in needed if name not in stored]
    unused = [name for name in stored if name not in needed]
    left_out = [name for name in unused if name.startswith(head.unused or ("\0",))]
    unknown = [name for name in unused if name not in left_out]
    if differ := checks.lacks_and_has(sorted(missing), unknown):
        raise checks.ConfigError(
            f"{source.name} does not hold the arrays of its config.json:\n{differ}."
        )
    if left_out:
        _logger.warning(
            f"{source.name}: {head.architecture} leaves out {checks.listed(left_out)}."
        )


def _check_shapes(
    source: sources.Source,
    row: name_tables.Row,
    expected: Mapping[str, Any],
    stored: Mapping[str, arrays.Stored],
) -> None:
    """Raises ConfigError unless a row's arrays have the shapes that the model needs."""
    ours = [expected[name].shape for name in row.ours]
    theirs = [stored[name].shape for name in row.theirs]
    # The inverse of the change tells the shapes. It takes memory of their size, so that
    # sizes are compared first.
    if sum(map(math.prod, ours)) == sum(map(math.prod, theirs)):
        zeros = [np.broadcast_to(np.float32(0), shape) for shape in ours]
        if [x.shape for x in row.change.to_theirs(zeros)] == theirs:
            return
    raise checks.ConfigError(
        f"{source.name} has {', '.join(row.theirs)} of shape {str(theirs)[1:-1]}, "
        f"which does not fit the {str(ours)[1:-1]} that its config.json needs."
    )
