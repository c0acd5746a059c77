"""Saves models: in the layout in which they were loaded, or in ours.

A model that was loaded from another library is saved with the config.json that it came
with, and its arrays get their names back by the table that renamed them. A pruned model
is written unpruned, with weights of 0 for the pruned heads, since no `config.json` can
say that a head is missing. Models made here are saved in our own layout.
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

from mha_haiku.core import arrays, checks, fields, models
from mha_haiku.core.modules import anatomy
from mha_haiku.interop import loader
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

_Params = Mapping[str, Mapping[str, Any]]

# Fields that no config.json has: they change no number, or say which heads are left.
_FREE = (
    "dropout_rate",
    "precision",
    "scan_layers",
    "attention.implementation",
    "attention.kept_heads",
    "origin",
)


def save(
    folder: str | os.PathLike,
    config: models.ModelConfig,
    params: Mapping[str, Mapping[str, Any]],
    *,
    tokenizer: tokenization.Tokenizer | None = None,
    own_layout: bool = False,
    num_classes: int | None = None,
) -> Path:
    """Writes a model as config.json, model.safetensors and tokenizer.json.

    A model that was loaded from another library keeps its layout, which `transformers`
    opens; its pruned heads are written with weights of 0, and a warning. `load` opens
    both layouts.

    Args:
      folder: The folder to write, which is returned. It must be missing or empty.
      config: `config.model`.
      params: The model's parameters, looped or stacked. Their dtype is kept, except
        that Gemma's norms are written in the dtype of the other parameters.
      tokenizer: The model's tokenizer. Only our own layout holds one of characters.
      own_layout: Whether to write our own layout, which holds every model as it is.
        Models that were made here have no other.
      num_classes: C, which must be given if logits are tied and have no bias.

    Raises:
      ConfigError: If the config or the parameters are no longer those of the loaded
        model, or the folder is not empty, or cannot be written.

    Example:
      >>> folder = mh.interop.save("my_model", config, params)
      >>> sorted(path.name for path in folder.iterdir())
      ['config.json', 'model.safetensors']
    """
    folder = checks.as_path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise checks.ConfigError(f"{folder} must be a new or an empty folder.")
    is_own = own_layout or not config.origin
    if is_own:
        contents = {
            "model_type": loader.OWN,
            "model": fields.flattened(config.to_json()),
            "sizes": _sizes_of(config, params, num_classes)._asdict(),
        }
        stored = {name: np.asarray(x) for name, x in loader.flat(params).items()}
    else:
        contents, stored = _as_loaded(config, params)
    described = None if tokenizer is None else _tokenizer_file(tokenizer, is_own)
    ends = () if tokenizer is None else tokenizer.end_tokens
    if len(ends) > 1 or (ends and is_own):  # config.json may name only one of them
        contents["eos_token_id"] = list(ends)
    if described is not None:
        checks.write_file(folder / "tokenizer.json", described)
    checks.write_file(
        folder / "model.safetensors",
        lambda file: arrays.write_safetensors(file.name, stored),
    )
    checks.write_file(folder / "config.json", json.dumps(contents, indent=2) + "\n")
    return folder


def _sizes_of(
    config: models.ModelConfig, params: _Params, num_classes: int | None
) -> loader.Sizes:
    sizes = loader.sizes_of(params)
    if num_classes is None and config.origin:
        num_classes = _loaded(config)[3].num_classes
    if num_classes is not None:
        return sizes._replace(num_classes=num_classes)
    has_decoder = config.family == "encoder_decoder"
    output = config.output
    if output.logits and output.tied and not output.with_bias and not has_decoder:
        raise checks.ConfigError(
            "num_classes must be given: tied logits without a bias do not show how "
            f"many of the {sizes.num_tokens} tokens are classes."
        )
    return sizes


def _as_loaded(
    config: models.ModelConfig, params: _Params
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Makes the config.json and the arrays of a model that was loaded, by their names.

    Raises:
      ConfigError: If the model is no longer the one that its config.json describes.
    """
    family, head, read, sizes = _loaded(config)
    ours, of_read = _meaning(config), _meaning(read)
    differing = [
        f"{name} = {ours[name]!r} for {x!r}"
        for name, x in of_read.items()
        if ours[name] != x
    ]
    if differing:
        raise checks.ConfigError(
            "config must be that of the config.json that the model was loaded with, "
            f"got {checks.listed(differing, 3)}.\nown_layout=True saves the model as "
            "it is, for mh.load."
        )
    looped = models.unstacked(params) if config.scan_layers else params
    if config.attention.kept_heads is not None:
        looped = _with_all_heads(config, looped, sizes)
    left = {name: np.asarray(x) for name, x in loader.flat(looped).items()}
    expected = loader.flat(loader.shapes(read, sizes))
    if differ := checks.lacks_and_has(
        sorted(expected.keys() - left.keys()), sorted(left.keys() - expected.keys())
    ):
        raise checks.ConfigError(f"params must be those of the config:\n{differ}.")
    for name, x in expected.items():
        if left[name].shape != x.shape:
            raise checks.ConfigError(
                f"params must have {name} of shape {x.shape}, got {left[name].shape}."
            )
    prefix = "" if head.rows else family.prefix
    result: dict[str, np.ndarray] = {}
    wide: set[str] = set()
    for row in loader.rows_of(family, head, read, expected):
        whole = row.change.to_theirs([left[name] for name in row.ours])
        for name, x in zip(row.theirs, whole, strict=True):
            result[name.removeprefix(prefix)] = x
            if row.change.is_wide:
                wide.add(name.removeprefix(prefix))
    dtype = jnp.result_type(
        *(x.dtype for name, x in result.items() if name not in wide)
    )
    for name in wide:
        result[name] = result[name].astype(dtype)
    if not read.output.tied:  # tied parts read separate arrays there
        for copy, of in head.copies.items():
            if of in result:
                result.setdefault(copy, result[of])
    # transformers reads the weights in this dtype.
    theirs = json.loads(config.origin)
    theirs.pop("torch_dtype", None)
    return {**theirs, "dtype": dtype.name}, result


def _loaded(config: models.ModelConfig) -> tuple:
    """Reads the config.json that a model was loaded with."""
    theirs = json.loads(config.origin)
    family = loader.family_of(theirs)
    head = loader.head_of(family, theirs)
    return family, head, *loader.read_fields(family, head, theirs)


def _meaning(config: models.ModelConfig) -> dict[str, Any]:
    """Returns the fields that a config.json tells, with numbers for their defaults."""
    size = models.key_size(config)
    meaning = fields.flattened(config.to_json()) | {
        "attention.key_size": size,
        "attention.num_key_value_heads": (
            config.attention.num_key_value_heads or config.attention.num_heads
        ),
        "attention.scale": config.attention.scale or size**-0.5,
    }
    return {name: x for name, x in meaning.items() if name not in _FREE}


def _with_all_heads(
    config: models.ModelConfig, params: _Params, sizes: loader.Sizes
) -> _Params:
    whole = config.replace(attention=dict(kept_heads=None), scan_layers=False)
    before, after = models.heads_of_layers(config), models.heads_of_layers(whole)
    result: dict[str, dict[str, np.ndarray]] = {}
    shapes = loader.shapes(whole, sizes)
    for module, name, shape in hk.data_structures.traverse(shapes):
        leaf = params.get(module, {}).get(name)
        part, axis = models.part_of(whole, module), anatomy.axis_of(module, name)
        if leaf is None:  # of a layer whose heads are all gone
            leaf = np.zeros(shape.shape, shape.dtype)
        elif part is not None and axis is not None:
            kinds = {anatomy.HEADS: "names", anatomy.KEY_VALUE_HEADS: "key_value_names"}
            if names := kinds.get(axis.holds):
                kept, every = (getattr(each[part], names) for each in (before, after))
                leaf = anatomy.spread(leaf, axis, kept, len(every))
        result.setdefault(module, {})[name] = leaf
    count = sum(len(y.names) - len(x.names) for x, y in zip(before, after, strict=True))
    _logger.warning(
        f"{count} pruned heads are written with weights of 0, since no config.json of "
        "transformers says that a head is missing; own_layout=True leaves them out."
    )
    return result


def _tokenizer_file(tokenizer: tokenization.Tokenizer, is_own: bool) -> str:
    content = json.loads(tokenizer.to_json())
    content = content.get("pretrained", content)
    if "model" not in content and not is_own:
        raise checks.ConfigError(
            "a tokenizer of characters has no tokenizer.json of transformers; "
            "own_layout=True keeps it."
        )
    return json.dumps(content) + "\n"
