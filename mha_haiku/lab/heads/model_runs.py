"""The subject of head measures: a model, its data, and a metric per example.

B batch, T positions, P attention parts (layers of heads), H heads of a part.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, masks, models, sites, tiles
from mha_haiku.core.modules import anatomy
from mha_haiku.training import tasks

Array = jax.Array

# Models of at most this many layers are not scanned: compiling them takes seconds.
FEW_LAYERS = 6

# From the logits of a batch and the batch itself to a number per example, `[B]`; lower
# is better, so negate an accuracy.
Metric = Callable[[Array, tasks.Example], Array]


# Batches that can be iterated over more than once: a list, not a generator. A `tqdm`
# around a list shows progress.
Batches = Iterable[tasks.Example]


class Measured(NamedTuple):
    """The subject of a measure: a model, its data, and a metric of the two.

    Functions that take a `subject` measure this model; of those that take pairs, its
    batches are the clean examples, and `corrupted` the other examples of the pairs.

    Example:
      >>> measured = mh.heads.Measured(model, mh.heads.metrics.loss, params, batches)
      >>> mh.heads.ablation(measured)
      Heads('Ablation of heads, 8 examples': 2 layers; ablation from ...
    """

    model: models.Model  # from `models.build`, or any pure functions of these arguments
    metric: Metric  # how badly the model performs; some measures differentiate it
    params: Any
    batches: Batches


def over(batches: Iterable[Any], function: Callable) -> list[Any]:
    """Runs a function on each batch; results are trees of host arrays."""
    check_batches(batches)
    results = [fetched(function(example)) for example in batches]
    if not results:
        raise ValueError("batches must not be empty.")
    return results


def check_batches(batches: Iterable[Any]) -> None:
    """Raises TypeError if batches can be iterated over only once."""
    if iter(batches) is batches:
        raise TypeError(
            "batches must be a list, or something else that can be iterated over "
            f"again, got {type(batches).__name__}; list(batches) makes one."
        )


def compiled(function: Callable, *, compacts: bool = True) -> Callable:
    """Makes a function of a model and keywords that returns a compiled program.

    The decorated function takes the model, its parameters, a batch and other arrays,
    and by keyword static options, such as a metric; the program takes the parameters
    and all later arguments. Programs are cached, so that a second run does not compile,
    nor one with edits that differ only in their arrays.
    Without `compacts` the function may call `compact` itself.
    """

    @functools.lru_cache(maxsize=8)
    def program(unedited: models.Model, **options: Any) -> Callable:
        def run(edits: Any, params: Any, *arrays: Any) -> Any:
            model = unedited.edited(*edits)
            pair = compact(model, params) if compacts else (model, params)
            return function(*pair, *arrays, **options)

        # Logits of long texts are only read by metrics, position by position.
        return jit(sites.blockwise(run))

    def of_model(model: models.Model, **options: Any) -> Callable:
        unedited, edits = model.unedited()
        run = program(unedited, **options)

        def checked(params: Any, *arrays: Any) -> Any:
            for array in arrays:
                if isinstance(array, tasks.Example):
                    check_tokens(model, params, array)
            return run(edits, params, *arrays)

        return checked

    return of_model


# A program of a model takes some megabytes for each of the shapes that it has run on.
_MOST_SHAPES = 32


def jit(function: Callable) -> Callable:
    """Compiles a function as `jax.jit` does, but keeps programs of few shapes."""
    # On a CPU, XLA gives a whole layer to its library YNN, with its constants as arrays
    # of the size of hidden values, unless it may only have products.
    kind = "xla_cpu_experimental_ynn_fusion_type"
    is_cpu = jax.default_backend() == "cpu"
    options = {kind: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"} if is_cpu else {}
    compiled: Any = jax.jit(function, compiler_options=options)
    inside = jax.jit(function)  # a program of a caller, which has the options

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return inside(*args)
        if compiled._cache_size() >= _MOST_SHAPES:
            compiled.clear_cache()
        return compiled(*args)

    return run


def shown(model: models.Model) -> models.Model:
    """Adds the sites of residual stream and norms to a wrapped function."""
    if model.config is not None:
        return model
    return model._replace(apply=sites.show_stream(model.apply))


def config_of(model: models.Model) -> Any:
    """Returns the config of a model, or raises ValueError if there is none."""
    if model.config is None:
        raise ValueError(
            "model must be from models.build or interop.load, whose architecture is "
            "known; got one without a config."
        )
    return model.config


def check_tokens(model: models.Model, params: Any, example: tasks.Example) -> None:
    """Raises ValueError if the model has no row for a token; see `Model.apply`.

    A compiled program cannot check tokens, and clips them.
    """
    arrays = example.model_inputs()
    for side in ("", "decoder_") if model.config is not None else ():
        rows = params.get(f"{side}embedding", {}).get("embeddings")
        if rows is not None and (tokens := arrays.get(f"{side}inputs")) is not None:
            lengths = arrays[f"{side}lengths"]
            models.check_rows(f"{side}inputs", tokens, len(rows), lengths)


def run(model: models.Model, params: Any, example: tasks.Example) -> Any:
    """Computes the model's `Output` on a batch, without dropout."""
    arrays = example.model_inputs()
    inputs = arrays.pop("inputs")  # positional: functions may name it otherwise
    return model.apply(params, None, inputs, **arrays, is_training=False)


@compiled
def logits(model: models.Model, params: Any, example: tasks.Example) -> Array | None:
    """Computes logits on a batch, in a program that later calls share."""
    return run(model, params, example).logits


@compiled
def maps(
    model: models.Model, params: Any, example: tasks.Example
) -> dict[str, attention.AttentionMap]:
    """Computes the attention maps of a wrapped function on a batch, by name."""
    return look(model, params, example, ["*/map"])[1]


def check_classes(
    name: str, model: models.Model, params: Any, example: tasks.Example, classes: Any
) -> None:
    """Raises ValueError if numbers are not classes of the model's logits."""
    count = model.num_classes
    if count is None:
        output = jax.eval_shape(functools.partial(run, model), params, example)
        count = output.logits.shape[-1]
    for number in np.ravel(np.asarray(classes)).tolist():
        checks.integer_in(name, number, 0, count - 1)


def look(
    model: models.Model, params: Any, example: tasks.Example, at: Any, **options: bool
) -> tuple[Any, dict[str, Any]]:
    """Computes the model's `Output` on a batch, and the values at sites, by name.

    `at` and the options are as in `sites.look`, and values as `arranged`. Sites of an
    encoder come first, sites of cross-attention last; attention parts are numbered in
    this order.
    """
    output, values = looking(functools.partial(run, model), at, example, **options)(
        params, example
    )
    names = sorted(values, key=lambda name: _ORDER.index(kind_of(name)))
    return output, collections.OrderedDict((name, values[name]) for name in names)


def run_edited(
    model: models.Model, params: Any, example: tasks.Example, edits: Any
) -> Any:
    """Computes the model's `Output` on a batch with edits, see `editing`."""
    return editing(functools.partial(run, model), edits, example)(params, example)


def looking(function: Callable, at: Any, example: tasks.Example, **options: bool):
    """Makes what `sites.look` makes, which returns values as `arranged`."""
    if not isinstance(at, Mapping):
        looked = sites.look(function, at, **options)

        def run(*args: Any) -> tuple[Any, dict[str, Any]]:
            output, values = looked(*args)
            return output, {x: arranged(x, y, example) for x, y in values.items()}

        return run

    def of(name: Any, read: Callable) -> Callable:
        @functools.wraps(read)
        def arranged_read(value: Any, *layer: Any) -> Any:
            return read(arranged(name, value, example), *layer)

        return arranged_read

    reads = {name: of(name, read) for name, read in at.items()}
    return sites.look(function, reads, **options)


def editing(function: Callable, edits: Mapping[Any, Any], example: tasks.Example):
    """Makes what `sites.edit` makes; changes take and return values as `arranged`."""

    def of(name: Any, change: Any) -> Any:
        if isinstance(change, sites.Resume):
            return change

        @functools.wraps(change)
        def changed(value: Any, *layer: Any) -> Any:
            whole = arranged(name, value, example)
            result = change(whole, *layer)
            return result if whole is value else result.reshape(value.shape)

        return changed

    return sites.edit(function, {x: of(x, y) for x, y in edits.items()})


_OF_ATTENTION = "gates", "heads", "key", "map", "query", "scores", "value", "weights"
_OF_STREAM = re.compile(r"stream|output|factor|(decoder_)?(token_)?embedding")


def arranged(name: Any, value: Any, example: tasks.Example) -> Any:
    """Arranges the value of a site by example, as sites of our models are.

    A function may drop the axis of a single example in its attention, or join the axes
    of examples and positions in its stream.
    """
    last = (name if isinstance(name, str) else name[0]).rpartition("/")[2]
    if last in _OF_ATTENTION and value.ndim == 3 and len(example.inputs) == 1:
        return jax.tree.map(lambda x: x[None] if jnp.ndim(x) else x, value)
    if _OF_STREAM.fullmatch(last) and value.ndim == 2:
        for inputs in (example.inputs, example.decoder_inputs):
            sides = () if inputs is None else np.shape(inputs)[:2]
            if len(sides) == 2 and len(value) == math.prod(sides):
                return value.reshape(*sides, -1)
    return value


_ORDER = ("encoder", "", "decoder", "cross")

# Names of cross-attention: here and in Flax, BART, T5 and torch.nn.
_CROSS = re.compile("cross|encoder_?attn|enc_?dec|multihead_attn", re.IGNORECASE)


def kind_of(name: str) -> str:
    """Finds the kind of attention of a site by its path, "" if unknown.

    A single stack of layers may also be called an encoder, or a decoder.
    """
    before, decoder, inside = f"/{name}".rpartition("/decoder/")
    if decoder:
        return "cross" if _CROSS.search(inside) else "decoder"
    return "encoder" if "/encoder/" in before + inside else ""


# Modules of a model of several towers, by what their names have.
_TOWER = re.compile(
    "(?<![a-z])(?:(?P<vision>vision|visual|image)|(?P<qformer>q_?former)|"
    "(?P<resampler>resampler|perceiver)|(?P<audio>audio|speech)|"
    "(?P<language>language|text))",
    re.IGNORECASE,
)


def kinds_by_path(paths: Sequence[str]) -> list[str]:
    """Finds the kinds of attention parts; towers, as of vision and language, are kinds.

    In a tower there may be several kinds: "qformer" and "qformer cross".
    """
    kinds, matches = list(map(kind_of, paths)), list(map(_TOWER.search, paths))
    if len({x and x.lastgroup for x in matches}) < 2:
        return kinds
    towers = [
        x.lastgroup if x else path.removeprefix("model/").partition("/")[0]
        for path, x in zip(paths, matches, strict=True)
    ]
    kinds = [
        "cross" if _CROSS.search(path) else kind
        for path, kind in zip(paths, kinds, strict=True)
    ]
    pairs = list(zip(towers, kinds, strict=True))
    both = {x for x, kind in pairs if kind == "encoder" and (x, "decoder") in pairs}
    return [
        f"{tower} {kind}" if kind == "cross" or tower in both else f"{tower}"
        for tower, kind in pairs
    ]


def reads_tokens(kind: str) -> bool:
    """Checks whether a kind of attention is of the text, and of no other tower."""
    return kind in ("", *models.KINDS) or kind.startswith("language")


def parts(model: models.Model, params: Any, example: tasks.Example) -> dict[str, int]:
    """Returns the number of heads of each attention part, by path."""
    if model.config is not None:
        places = models.heads_of_layers(model.config)
        return {place.path: len(place.names) for place in places}
    shapes = _heads_of(model).eval_shape(params, example)
    return {name.rpartition("/")[0]: x.shape[-2] for name, x in shapes.items()}


@functools.lru_cache(maxsize=32)
def _heads_of(model: models.Model) -> Any:
    # Traces a function once for inputs of one shape.
    return jax.jit(lambda params, x: look(model, params, x, ["*/heads"])[1])


def compact(model: models.Model, params: Any) -> tuple[models.Model, Any]:
    """Returns a model and parameters; the model scans its layers if they are many."""
    if model.scanned is None:
        return model, params
    is_deep = any(f"layer_{FEW_LAYERS}/" in module for module in params)
    return (model.scanned, models.stacked(params)) if is_deep else (model, params)


def layer_numbers(paths: Sequence[str]) -> list[int]:
    """Numbers the layers of attention parts of one kind, as their paths do.

    Layers without attention have no path, so that there are gaps. Paths that do not
    count their layers are numbered in order.
    """
    before = os.path.commonprefix([*paths]).rstrip("0123456789")
    if len(paths) == 1:  # of layer 3 alone
        before = re.split(r"(?<![^/_.])\d+(?![^/_.#])", paths[0])[0]
    matches = [re.match(r"\d+(?![^/_.#])", path[len(before) :]) for path in paths]
    numbers = [int(x[0]) for x in matches if x]
    is_count = len(numbers) == len(paths) and numbers == sorted({*numbers})
    return numbers if is_count else list(range(len(paths)))


def is_scanned(model: models.Model, params: Any) -> bool:
    """Checks whether parameters are stacked, as for scanned layers."""
    return model.config is not None and any(map(anatomy.is_stacked, params))


def kinds_of(
    model: models.Model, params: Any = None, example: tasks.Example | None = None
) -> list[str]:
    """Lists the kind of each attention part; [] if there is one kind.

    For a wrapped function this needs parameters and an example. It has towers only if
    it also reads floats, such as pixels.
    """
    if model.config is None and example is not None:
        has_decoder, others = _has_decoder(example), (example.others or {}).values()
        has_pixels = any(jnp.issubdtype(x.dtype, jnp.floating) for x in others)
        if not has_decoder and not has_pixels:
            return []
        kinds = kinds_by_path([*parts(model, params, example)])
        return kinds if has_decoder or len({*kinds}) > 1 else []
    if model.config is None or model.config.family != "encoder_decoder":
        return []
    return [part.kind for part in models.heads_of_layers(model.config)]


def kinds_measured(subject: Measured) -> list[str]:
    """Calls `kinds_of`; draws a batch only for a wrapped function."""
    model, params, batches = subject.model, subject.params, subject.batches
    example = next(iter(batches)) if model.config is None else None
    return kinds_of(model, params, example)


def queries(
    example: tasks.Example, kind: str
) -> tuple[Array | np.ndarray, Array | np.ndarray | None]:
    """Returns the inputs at the queries of maps of a kind, and their valid lengths."""
    if kind in ("decoder", "cross") and example.decoder_inputs is not None:
        return example.decoder_inputs, example.decoder_lengths
    return example.inputs, example.lengths


def tokens(example: tasks.Example, kind: str) -> Array | np.ndarray | None:
    """Returns the tokens `[B, T]` at queries and keys of maps of a kind.

    None for features, or if queries and keys are from different texts.
    """
    inputs, _ = queries(example, kind)
    is_tokens = jnp.issubdtype(inputs.dtype, jnp.integer)
    return jnp.asarray(inputs) if is_tokens and kind != "cross" else None


def tokens_at(example: tasks.Example, kind: str, places: Sequence[int]) -> Array | None:
    """Marks the keys of maps of a kind that are chosen tokens, `[B, S]`; or None."""
    are_tokens = jnp.issubdtype(example.inputs.dtype, jnp.integer)
    if kind == "decoder" or not are_tokens or not places:
        return None
    return jnp.isin(jnp.asarray(example.inputs), jnp.array(places, jnp.int32))


def key_lengths(example: tasks.Example, kind: str) -> Array | np.ndarray | None:
    """Returns the ends `[B]` of the valid keys of maps of a kind; None if all are.

    They are the numbers of keys. Where a mask hides others at the beginning, the ends
    are as far behind the last valid key as the first one is behind position 0, so that
    the map's anti-diagonal is where positions have the sum end - 1.
    """
    side = "decoder_" if kind == "decoder" and _has_decoder(example) else ""
    mask, lengths = _mask(example, side), getattr(example, f"{side}lengths")
    if mask is None:
        return lengths
    seen = counted(mask.shape[1], example, side)
    return mask.shape[1] + jnp.argmax(seen, 1) - jnp.argmax(seen[:, ::-1], 1)


def valid(size: int, example: tasks.Example, kind: str) -> Array:
    """Marks which of `size` queries of maps of a kind are valid, `[B, T]`.

    Lengths say so, and the masks of a wrapped function's inputs, `attention_mask` and
    `decoder_attention_mask` `[B, T]`.
    """
    return counted(size, example, _side(example, kind))


def _has_decoder(example: tasks.Example) -> bool:
    return example.decoder_inputs is not None


def _side(example: tasks.Example, kind: str) -> str:
    """Returns what the names of arrays at the queries of a kind begin with."""
    of_decoder = kind in ("decoder", "cross") and _has_decoder(example)
    return "decoder_" if of_decoder else ""


def _mask(example: tasks.Example, side: str) -> Array | np.ndarray | None:
    """Returns the mask of the inputs of a side, None if there is none.

    In torch.nn, booleans called a padding mask are True at the padding.
    """
    shape, others = np.shape(getattr(example, f"{side}inputs"))[:2], example.others
    for name, mask in (others or {}).items():
        if np.shape(mask) != shape:
            continue
        if name == f"{side}attention_mask":
            return mask
        of_side = bool(_TARGET.match(name)) == bool(side) or not _has_decoder(example)
        if name.endswith("padding_mask") and of_side:
            return ~mask if mask.dtype == bool else mask
    return None


_TARGET = re.compile("decoder_|tgt_|target_")


def counted(size: int, example: tasks.Example, side: str) -> Array:
    """Marks which of `size` inputs of a side count, `[B, size]`."""
    marks = jnp.ones((len(example.inputs), size), bool)
    lengths, mask = getattr(example, f"{side}lengths"), _mask(example, side)
    if lengths is not None:
        marks &= jnp.arange(size)[None] < jnp.asarray(lengths)[:, None]
    if mask is not None and mask.shape[1] == size:
        seen = jnp.asarray(mask) > 0
        # Without a positive number it is added to scores, and 0 means seen.
        marks &= jnp.where(seen.any(), seen, jnp.asarray(mask) == 0)
    return marks


# Special tokens: ends of texts, such as [SEP], and tokens of pictures.
Marks = tuple[tuple[int, ...], tuple[int, ...]]


def counted_map(
    attention_map: attention.AttentionMap,
    model: models.Model,
    example: tasks.Example,
    kind: str,
    marks: Marks,
) -> tuple[attention.AttentionMap, dict[str, Any]]:
    """Masks padding in a map; also returns what statistics and roles are told.

    These are tokens, marked keys and lengths, all None of a tower without tokens.
    """
    told: dict[str, Any] = {"kind": "cross" if kind.endswith("cross") else kind}
    names = "tokens", "lengths", "separators", "pictures"
    if not reads_tokens(kind):
        return attention_map, told | dict.fromkeys(names)
    kind = kind.removeprefix("language").strip()
    marked = [tokens_at(example, kind, x) for x in marks]
    values = tokens(example, kind), key_lengths(example, kind), *marked
    told |= dict(zip(names, values, strict=True))
    return without_padding(attention_map, model, example, kind), told


def without_padding(
    attention_map: attention.AttentionMap,
    model: models.Model,
    example: tasks.Example,
    kind: str,
) -> attention.AttentionMap:
    """Masks padding in the map of a layer, so that no statistic sees it.

    A model with a config does so itself. A wrapped function may mask no queries, as in
    transformers, and keys by large negative scores: keys of padding are masked where
    no valid query attends to them. Where the rows of a map are not the inputs, or a
    mask of another name is given, keys that no query of an example sees are padding.
    """
    inputs, _ = queries(example, kind)
    *batch, _, num_queries, num_keys = attention_map.shape
    is_known = kind or not _has_decoder(example)
    is_padded = any(
        _mask(example, side) is not None
        or getattr(example, f"{side}lengths") is not None
        for side in ("", *(["decoder_"] if _has_decoder(example) else []))
    )
    has_rows = (*batch, num_queries) == inputs.shape[:2]
    others = (example.others or {}).values()
    has_others = any(x.ndim > 1 and len(x) == len(inputs) for x in others)
    if model.config is not None or len(batch) != 1 or not (is_padded or has_others):
        return attention_map
    if is_known and is_padded and has_rows:
        is_valid = valid(num_queries, example, kind)
        is_key = None
    else:
        ones = jnp.ones((*batch, num_queries, 1, 1), attention_map.dtype)
        is_key = (attention_map.apply_transposed(ones) != 0).any((2, 3))
        is_self = num_queries == num_keys and kind != "cross"
        is_valid = is_key if is_self else ones[..., 0, 0] > 0
    logs = jnp.where(is_valid[:, None], attention_map.logsumexp, -jnp.inf)
    attention_map = dataclasses.replace(
        attention_map,
        query=jnp.where(is_valid[..., None, None], attention_map.query, 0),
        log_sum=attention_map.log_sum._replace(logsumexp=logs),
    )
    keys = example.inputs if kind == "cross" else inputs
    if is_key is None and keys.shape[1] != num_keys:
        is_key = jnp.ones((len(inputs), num_keys), bool)
    elif is_key is None:
        side = "" if kind == "cross" else _side(example, kind)
        is_key = counted(num_keys, example, side)
        on_padding = attention_map.apply(1.0 * ~is_key[..., None, None])
        is_key |= (on_padding != 0).any((1, 2, 3))[:, None]
    weighting = attention_map.weighting
    mask = _Among(is_valid, is_key, weighting.origin).aligned(len(batch))
    mask = weighting.mask & mask
    return dataclasses.replace(attention_map, weighting=weighting._replace(mask=mask))


@tiles.pytree
class _Among(masks.Mask):
    """The keys of a map that count, for the queries that count."""

    queries: Array = tiles.array("T")
    keys: Array = tiles.array("S")
    origin: tiles.Origin

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        queries = tiles.take(self.queries, rows + -self.origin.query, axis=-1)
        keys = tiles.take(self.keys, columns + -self.origin.key, axis=-1)
        return queries[..., None, :, None] & keys[..., None, None, :]

    def first_key(self) -> Array:
        return self.origin.key + self.keys.argmax(-1)

    def at_head(self, example: tuple, head: int | Array) -> "_Among":
        queries, keys = (tiles.at_batch(x, example) for x in (self.queries, self.keys))
        return _Among(queries, keys, self.origin)


def by_example(heads: Array, count: int) -> Array:
    """Arranges the outputs `[..., T, H, V]` of heads as `[B, T, H, V]`, B = `count`.

    A function may have several consecutive rows per example, such as the shifted
    windows of an image: these are concatenated along T. The axis of a single example
    may be missing.

    Raises:
      ValueError: If the number of rows is not a multiple of the number of examples.
    """
    rows = heads.shape[0] if heads.ndim > 3 else 1
    if rows % count:
        raise ValueError(
            "the first axis of heads must be a multiple of the examples, got shape "
            f"{heads.shape} for {count}."
        )
    length = math.prod(heads.shape[:-2]) // count
    return heads.reshape(count, length, *heads.shape[-2:])


def exists(counts: Iterable[int]) -> np.ndarray:
    """Marks the heads that exist, `[P, H]` booleans, from the counts of the parts."""
    counts = np.array([*counts])
    return np.arange(counts.max())[None] < counts[:, None]


def num_heads(model: models.Model, params: Any, example: tasks.Example) -> list[int]:
    """Lists the number of heads of each attention part."""
    return list(parts(model, params, example).values())


def by_kind(
    function: Callable[..., Any],
    model: models.Model,
    params: Any = None,
    example: tasks.Example | None = None,
) -> dict[str, Callable]:
    """Returns the `at` of `look` that calls `function(map, kind=...)` for each map.

    The kind is one of `models.KINDS`, or "" in models of one kind; see `kinds_of`.
    """
    if not (kinds := kinds_of(model, params, example)):
        names: dict[Any, str] = {"*/map": ""}
    elif model.config is None and example is not None:
        paths = parts(model, params, example)
        names = {
            (f"{x}/map".removeprefix("/"),): y
            for x, y in zip(paths, kinds, strict=True)
        }
    else:
        names = {"decoder/*/cross_attention/map": "cross", "decoder/*/map": "decoder"}
        names["*/map"] = "encoder"
    return {at: functools.partial(function, kind=kind) for at, kind in names.items()}


def fetched(tree: Any) -> Any:
    """Copies arrays to the host, and gathers them if several processes share them."""
    if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)
