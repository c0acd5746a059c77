"""Saves models as folders that `transformers` opens, or that only `load` reads.

A family can hold a model if and only if the `config.json` that its table writes, read
again by the same table, is the model's config. So no list says which models can be
written. A pruned model is written unpruned, with weights of 0 for the pruned heads,
since no `config.json` can say that a head is missing.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import arrays, checks, fields, models, modules, positions
from mha_haiku.core.modules import anatomy
from mha_haiku.interop import loading
from mha_haiku.interop.families import FAMILIES, name_tables
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

_Params = Mapping[str, Mapping[str, Any]]

# Fields that change no number of the forward pass, and that files need not have.
_FREE = (
    "dropout_rate",
    "precision",
    "rematerialize",
    "scan_layers",
    "attention.implementation",
)
# Sizes that are 0 where a model lacks a part, without which transformers has no layer.
_PARTS = ("attention.num_heads", "feed_forward.hidden_size")


def save(
    folder: str | os.PathLike,
    config: models.ModelConfig,
    params: Mapping[str, Mapping[str, Any]],
    *,
    tokenizer: tokenization.Tokenizer | None = None,
    family: str | None = None,
    num_classes: int | None = None,
) -> Path:
    """Writes a model as config.json, model.safetensors and tokenizer.json.

    Args:
      folder: The folder to write, which is returned; it is made if it is missing.
      config: `config.model`.
      params: The model's parameters, looped or stacked. Their dtype is kept, except
        that Gemma's norms are written in the dtype of the other parameters.
      tokenizer: The model's tokenizer. Only "mha_haiku" holds one of characters.
      family: The layout: a family of `transformers`, as "llama", whose class then opens
        it. Defaults to the first family that can hold the model. Pruned heads are
        written with weights of 0, and a warning. "mha_haiku" holds every model as it
        is, and is read by `load`.
      num_classes: C, which tied logits without a bias do not show. Defaults to what the
        parameters show, or to the number of tokens.

    Raises:
      ConfigError: If the family cannot hold the model or its tokenizer, or none can,
        with the reason; or if the folder holds a run, or cannot be written.

    Example:
      >>> folder = mh.interop.save("my_model", config, params, family="mha_haiku")
      >>> sorted(path.name for path in folder.iterdir())
      ['config.json', 'model.safetensors']
    """
    sizes = loading.sizes_of(params)
    if num_classes is not None:
        sizes = sizes._replace(num_classes=num_classes)
    described = None if tokenizer is None else _tokenizer_file(tokenizer, family)
    if family == loading.OWN:
        contents = {
            "model_type": loading.OWN,
            "model": fields.flattened(config.to_json()),
            "sizes": sizes._asdict(),
        }
        stored = {name: np.asarray(x) for name, x in loading.flat(params).items()}
    else:
        looped = models.unstacked(params) if config.scan_layers else params
        if config.attention.kept_heads is not None:
            config, looped = _with_all_heads(config, looped, sizes)
        contents, stored = _of_a_family(config, looped, sizes, family)
    folder = checks.as_path(folder)
    if (folder / "checkpoints").exists():
        raise checks.ConfigError(
            f"{folder} holds a run, whose config.json would be replaced; choose "
            "another folder."
        )
    # The config last: without it the folder is no model, should this be cut off.
    try:
        for name in ("config.json", "tokenizer.json"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise checks.ConfigError(
            f"{folder} cannot be written: {error.strerror}."
        ) from None
    checks.write_file(
        folder / "model.safetensors",
        lambda file: arrays.write_safetensors(file.name, stored),
    )
    if described is not None:
        checks.write_file(folder / "tokenizer.json", described)
    checks.write_file(folder / "config.json", json.dumps(contents, indent=2) + "\n")
    return folder


def _with_all_heads(
    config: models.ModelConfig, params: _Params, sizes: loading.Sizes
) -> tuple[models.ModelConfig, _Params]:
    whole = config.replace(attention=dict(kept_heads=None))
    before, after = models.heads_of_layers(config), models.heads_of_layers(whole)
    result: dict[str, dict[str, np.ndarray]] = {}
    shapes = loading.shapes(whole, sizes)
    for module, name, wanted in hk.data_structures.traverse(shapes):
        leaf = params.get(module, {}).get(name)
        part, axis = models.part_of(whole, module), anatomy.axis_of(module, name)
        if leaf is None:  # of a layer whose heads are all gone
            leaf = np.zeros(wanted.shape, wanted.dtype)
        elif part is not None and axis is not None:
            kinds = {anatomy.HEADS: "names", anatomy.KEY_VALUE_HEADS: "key_value_names"}
            if names := kinds.get(axis.holds):
                kept, every = (getattr(each[part], names) for each in (before, after))
                leaf = anatomy.spread(leaf, axis, kept, len(every))
        result.setdefault(module, {})[name] = leaf
    count = sum(len(y.names) - len(x.names) for x, y in zip(before, after, strict=True))
    _logger.warning(
        f"{count} pruned heads are written with weights of 0, since no config.json of "
        f"transformers says that a head is missing; family={loading.OWN!r} leaves them "
        "out."
    )
    return whole, result


def _of_a_family(
    config: models.ModelConfig, params: _Params, sizes: loading.Sizes, name: str | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if name is not None:
        with checks.user_mistakes():
            checks.choice("family", name, (*FAMILIES, loading.OWN))
    families = FAMILIES.values() if name is None else [FAMILIES[name]]
    with_segment = config, params
    if not config.embedding.segments:  # one of zeros changes no number
        zeros = {"embeddings": np.zeros((1, config.model_size), np.float32)}
        one = config.replace(embedding=dict(segments=1))
        with_segment = one, {**params, "segments": zeros}
    reasons = []
    # Families that hold the model unchanged come first.
    for family in sorted(families, key=_has_segments):
        own, arrays_of = with_segment if _has_segments(family) else (config, params)
        for head in family.heads:
            try:
                theirs, read = _written(family, head, own, sizes)
            except name_tables.CannotSayError as error:
                reasons.append((error.count, f"{family.name} cannot say {error}"))
                continue
            return theirs, _stored(family, head, own, sizes, read, arrays_of)
    why = min(reasons, key=lambda reason: reason[0])[1]  # of the nearest
    raise checks.ConfigError(
        f"No family of transformers holds this model: {why}.\n"
        f"family={loading.OWN!r} writes it as safetensors that interop.load reads."
    )


def _has_segments(family: name_tables.Family) -> bool:
    return any("segments/embeddings" in row.ours for row in family.rows)


def _written(
    family: name_tables.Family,
    head: name_tables.OutputHead,
    config: models.ModelConfig,
    sizes: loading.Sizes,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes the config.json that reads as this config, or raises CannotSayError.

    Also returns the result of reading it, with defaults.
    """
    ours = _said(config, sizes)
    theirs: dict[str, Any] = {}
    for name in _PARTS:
        if not ours[name]:
            raise name_tables.CannotSayError(f"{name} = 0", 0)
    for setting in (*family.settings, *head.settings):
        for name, value in setting.write(ours).items():
            if theirs.setdefault(name, value) != value:
                raise name_tables.CannotSayError(f"{name} of two values")
    theirs = {"architectures": [head.architecture], "model_type": family.name, **theirs}
    try:
        again, again_sizes, read = loading.read_fields(family, head, theirs)
    except checks.ConfigError as error:
        raise name_tables.CannotSayError(str(error)) from None
    wanted, found = _meaning(config, sizes), _meaning(again, again_sizes)
    differing = [name for name, x in wanted.items() if (name, x) not in found.items()]
    if differing:
        raise name_tables.CannotSayError(
            ", ".join(f"{name} = {wanted[name]!r}" for name in differing[:3]),
            len(differing),
        )
    return theirs, read


def _meaning(config: models.ModelConfig, sizes: loading.Sizes) -> dict[str, Any]:
    """Normalizes the values of fields that a file can write in several forms."""
    said = _said(config, sizes)
    for name in _FREE:
        del said[name]
    said["attention.scale"] = float(f"{said['attention.scale']:.6g}")
    said["embedding.scale"] = float(f"{config.embedding.scale:.6g}")
    said["attention.window"] = models.windows(config)
    if modules.POSITION_SCHEMES[config.embedding.positions].rotate:
        period = config.embedding.rotary_period
        plain = positions.frequencies_of(models.key_size(config), period)
        said["embedding.frequencies"] = [
            [float(f"{x:.6g}") for x in (plain if each is None else each)]
            for each in models.frequencies(config)
        ]
    said.pop("embedding.rotary_period")
    if not config.output.logits:  # fields of what is not there
        for name in ("with_bias", "pool"):
            said.pop(f"output.{name}")
        said.pop("num_classes")
    return said


def _said(config: models.ModelConfig, sizes: loading.Sizes) -> dict[str, Any]:
    """Collects all fields and sizes, with numbers for the defaults of heads."""
    said = {**fields.flattened(config.to_json()), **sizes._asdict()}
    size = models.key_size(config)
    said["attention.key_size"] = size
    said["attention.num_key_value_heads"] = (
        config.attention.num_key_value_heads or config.attention.num_heads
    )
    said["attention.scale"] = config.attention.scale or size**-0.5
    return said


def _stored(
    family: name_tables.Family,
    head: name_tables.OutputHead,
    config: models.ModelConfig,
    sizes: loading.Sizes,
    theirs: Mapping[str, Any],
    params: _Params,
) -> dict[str, np.ndarray]:
    prefix = "" if head.rows or head.has else family.prefix
    result: dict[str, np.ndarray] = {}
    wide: set[str] = set()
    left = loading.flat(params)
    looped = config.replace(scan_layers=False)
    names = loading.flat(loading.shapes(looped, sizes))
    for row in loading.rows_of(family, head, config, names):
        place = name_tables.Place(config, theirs, row.layer)
        for name in row.ours:
            if name not in left:
                raise checks.ConfigError(
                    f"params must have {name}, as the config says."
                )
        ours = [np.asarray(left.pop(name)) for name in row.ours]
        for name, x in zip(row.theirs, row.change.to_theirs(ours, place), strict=True):
            result[name.removeprefix(prefix)] = x
            if row.change.is_wide:
                wide.add(name.removeprefix(prefix))
    others = [x.dtype for name, x in result.items() if name not in wide]
    for name in wide:
        result[name] = result[name].astype(jnp.result_type(*others))
    if not config.output.tied:  # tied parts read separate arrays there
        for copy, of in head.copies.items():
            if of in result:
                result.setdefault(copy, result[of])
    if left:
        raise checks.ConfigError(
            "params must be parameters of the config's model, and also have "
            f"{checks.listed(sorted(left))}."
        )
    return result


def _tokenizer_file(tokenizer: tokenization.Tokenizer, family: str | None) -> str:
    content = json.loads(tokenizer.to_json())
    content = content.get("pretrained", content)
    if "model" not in content and family != loading.OWN:
        raise checks.ConfigError(
            "a tokenizer of characters has no tokenizer.json of transformers; "
            f"family={loading.OWN!r} keeps it."
        )
    return json.dumps(content) + "\n"
