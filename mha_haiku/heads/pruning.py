"""Pruning: a smaller model without some heads or hidden units, for good.

L layers, H heads of a layer, G key/value heads, D width, F hidden units. Heads go by
the names that they had in the unpruned model: its indices.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku import models

if TYPE_CHECKING:
    import ml_collections

Params = Mapping[str, Mapping[str, Any]]

_LAYER = re.compile(r"(?:.*/)?layer_(?P<i>\d+)/(?P<rest>.*)")


def prune(
    params: Params, config: "ml_collections.ConfigDict", keep: Sequence[Sequence[int]]
) -> "tuple[dict[str, dict[str, Any]], ml_collections.ConfigDict]":
    """Removes heads: columns of query, key and value, and rows of the output map.

    The pruned model computes what the model does with gates of 0 at these heads. A
    key/value head goes with the last query head that reads it; of a layer without heads
    the bias of its output map stays. What layers share, T5's table of biases, stays
    whole.

    Args:
      params: The parameters, pruned before or not; of scanned layers too.
      config: `config.model`, which describes them.
      keep: The heads that each of the L layers keeps, by their names; or `[L, H]`
        booleans, True for these.

    Returns:
      The parameters of looped layers, and their config: its `attention.kept_heads` is
      `keep`.

    Raises:
      ValueError: If a head is kept that is not there.

    Source: Michel et al. 2019, section 4, https://arxiv.org/abs/1905.10650.
    """
    before = models.heads_of_layers(config)
    keep = _names(keep, before)
    params, config = _looped(params, config)
    config.attention.key_size = models.key_size(config)
    config.attention.kept_heads = keep
    after = models.heads_of_layers(config)
    pruned = {}
    for module, leaves in params.items():
        found = _LAYER.fullmatch(module)
        rest = found and found["rest"]
        if not rest or rest.partition("/")[0] != "attention":
            pruned[module] = dict(leaves)
            continue
        i = int(found["i"])
        part = rest.partition("/")[2]
        leaves = _without_heads(part, leaves, before[i], after[i])
        if leaves is not None:
            pruned[module] = leaves
    return pruned, config


def prune_units(
    params: Params, config: "ml_collections.ConfigDict", keep: Sequence[Sequence[int]]
) -> "tuple[dict[str, dict[str, Any]], ml_collections.ConfigDict]":
    """Removes hidden units of the feed-forward parts.

    Args:
      params: The parameters, of scanned layers too.
      config: `config.model`, which describes them.
      keep: The indices of the hidden units that each of the L layers keeps, at least
        one; or `[L, F]` booleans.

    Returns:
      The parameters of looped layers, and their config with its
      `feed_forward.hidden_sizes`.

    Raises:
      ValueError: If a unit is kept that is not there, or none is.
    """
    keep = [_indices(row) for row in keep]
    for i, (units, size) in enumerate(
        zip(keep, models.hidden_sizes(config), strict=True)
    ):
        if not units or units != sorted(set(units) & set(range(size))):
            raise ValueError(
                f"layer {i} must keep at least one of its hidden units 0 to {size - 1},"
                f" each once, got {units}."
            )
    params, config = _looped(params, config)
    config.feed_forward.hidden_sizes = [len(units) for units in keep]
    pruned = {}
    for module, leaves in params.items():
        found = _LAYER.fullmatch(module)
        pruned[module] = dict(leaves)
        scope, _, part = found["rest"].partition("/") if found else ("", "", "")
        if scope == "feed_forward":
            kept = np.array(keep[int(found["i"])])
            axis = 0 if part == "output" else -1
            pruned[module]["w"] = np.asarray(leaves["w"]).take(kept, axis)
            if "b" in leaves and part != "output":
                pruned[module]["b"] = np.asarray(leaves["b"])[kept]
    return pruned, config


def open_gates(
    config: "ml_collections.ConfigDict", keep: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Returns gates that close what `prune` removes: L arrays `[H]` of 0 and 1.

    Args:
      config: `config.model`.
      keep: As in `prune`.
    """
    layers = models.heads_of_layers(config)
    keep = _names(keep, layers)
    return [
        np.isin(layer.names, kept).astype(np.float32)
        for layer, kept in zip(layers, keep, strict=True)
    ]


def scaled(
    params: Params, config: "ml_collections.ConfigDict", gates: Sequence[np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Returns the parameters with gates multiplied into them.

    Args:
      params: The parameters of looped layers.
      config: `config.model`, which describes them.
      gates: L arrays `[H]`: rows of the output map of head h are multiplied by gate h.
    """
    value_size = models.key_size(config)
    result = {module: dict(leaves) for module, leaves in params.items()}
    for module, leaves in params.items():
        found = _LAYER.fullmatch(module)
        if found and found["rest"] == "attention/linear" and "w" in leaves:
            rows = np.repeat(np.asarray(gates[int(found["i"])]), value_size)
            result[module]["w"] = np.asarray(leaves["w"]) * rows[:, None]
    return result


def _looped(params, config):
    """Returns parameters of looped layers, and a config of its own for them."""
    from ml_collections import ConfigDict

    config = ConfigDict(config.to_dict())
    if config.scan_layers:
        params, config.scan_layers = models.unstacked(params), False
    config.unlock()
    return params, config


def _indices(row) -> list[int]:
    row = np.asarray(row)
    return sorted(int(i) for i in (np.flatnonzero(row) if row.dtype == bool else row))


def _names(keep, layers) -> list[list[int]]:
    """Returns the names of the heads that each layer keeps, and checks them."""
    if len(keep) != len(layers):
        raise ValueError(
            f"keep must have an entry for each of the {len(layers)} layers, got "
            f"{len(keep)}."
        )
    result = []
    for i, (row, layer) in enumerate(zip(keep, layers, strict=True)):
        names = _indices(row)
        absent = sorted(set(names) - set(layer.names))
        if absent or len(set(names)) < len(names):
            raise ValueError(
                f"layer {i} must keep some of its heads {list(layer.names)}, each "
                f"once, got {names}."
            )
        result.append(names)
    return result


def _without_heads(part, leaves, before, after) -> dict[str, Any] | None:
    """Returns what is left of a module of an attention, or None."""
    of_queries = [before.names.index(name) for name in after.names]
    of_keys = [before.key_value_names.index(name) for name in after.key_value_names]
    if part == "linear":
        kept = {name: leaf for name, leaf in leaves.items() if name != "w"}
        if after.names:
            kept["w"] = _taken(leaves["w"], len(before.names), of_queries, 0)
        return kept or None
    if not after.names:
        return None
    if part == "query":
        return {
            name: _taken(leaf, len(before.names), of_queries, -1)
            for name, leaf in leaves.items()
        }
    if part in ("key", "value", ""):  # "": the shares of smeared keys, `[G]`
        return {
            name: _taken(leaf, before.num_key_value_heads, of_keys, -1)
            for name, leaf in leaves.items()
        }
    return dict(leaves)  # what heads share, such as the scales of normalized queries


def _taken(leaf, num_heads, heads, axis) -> np.ndarray:
    """Returns the parts of some heads of an axis `[H * size]`."""
    leaf = np.asarray(leaf)
    size = leaf.shape[axis] // num_heads
    places = np.concatenate([np.arange(size) + head * size for head in heads])
    return leaf.take(places, axis)
