"""Pruning: permanent removal of heads from a model.

L layers, H heads of a layer. A head is named by its index in the unpruned layer. In an
encoder-decoder the "layers" of heads are its attention parts, in the order of
`models.heads_of_layers`. `config` is `config.model`, which describes the parameters;
these may be stacked (scanned layers), or already pruned.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mha_haiku.core import models
from mha_haiku.core.modules import anatomy

Params = Mapping[str, Mapping[str, Any]]


def prune(
    params: Params,
    config: models.ModelConfig,
    keep: Sequence[Sequence[int]] | Sequence[Sequence[bool]],
) -> tuple[dict[str, dict[str, Any]], models.ModelConfig]:
    """Removes heads: columns of query, key and value, rows of the output projection.

    The pruned model computes the same as the model with gates of 0 at these heads. A
    key/value head is removed with the last query head that reads it. A layer without
    heads keeps the bias of its output projection. Parameters that layers share (the
    table of T5's position biases) are unchanged.

    `keep` names the heads to keep in each of the L layers, or is `[L, H]` booleans. The
    result is the parameters, unstacked, and their config, with `attention.kept_heads`.

    Raises:
      ValueError: If a head to keep does not exist, or `modules.anatomy` does not know
        the names of the parameters.

    Source: Michel et al. 2019, section 4, https://arxiv.org/abs/1905.10650.

    Example:
      >>> pruned, smaller = mh.heads.prune(params, config, keep=[[0], [0]])
      >>> smaller.attention.kept_heads
      ((0,), (0,))
      >>> [x["encoder/layer_0/attention/query"]["w"].shape for x in (params, pruned)]
      [(45, 26), (45, 13)]
    """
    before = models.heads_of_layers(config)
    keep = kept_names(keep, before)
    if config.scan_layers:
        params, config = models.unstacked(params), config.replace(scan_layers=False)
    pruned = config.replace(
        attention=dict(key_size=models.key_size(config), kept_heads=keep)
    )
    after = models.heads_of_layers(pruned)

    def without_heads(i: int, axis: anatomy.Axis, leaf: Any) -> Any:
        if not after[i].names:
            return None  # a layer without heads has no parameters of heads
        if axis.holds == anatomy.HEAD_FEATURES:
            return leaf
        names, stay = (
            x.names if axis.holds == anatomy.HEADS else x.key_value_names
            for x in (before[i], after[i])
        )
        return anatomy.taken(leaf, axis, len(names), [names.index(x) for x in stay])

    holders = (anatomy.HEADS, anatomy.KEY_VALUE_HEADS, anatomy.HEAD_FEATURES)
    return _changed(params, config, holders, without_heads), pruned


def open_gates(
    config: models.ModelConfig, keep: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Makes gates, L arrays `[H]`: 0 for heads that `prune` removes, else 1.

    Example:
      >>> mh.heads.open_gates(config, keep=[[0], [0, 1]])
      [array([1., 0.], dtype=float32), array([1., 1.], dtype=float32)]
    """
    layers = models.heads_of_layers(config)
    pairs = zip(layers, kept_names(keep, layers), strict=True)
    return [np.isin(layer.names, kept).astype(np.float32) for layer, kept in pairs]


def scaled(
    params: Params, config: models.ModelConfig, gates: Sequence[np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Multiplies gates, L arrays `[H]`, into the rows of the output projections.

    Raises:
      ValueError: If gates do not have all layers and heads, or as in `prune`.

    Example:
      >>> gates = mh.heads.open_gates(config, keep=[[1], [0, 1]])
      >>> without = mh.heads.scaled(params, config, gates)
      >>> output = model.apply(without, None, tokens, is_training=False)
      >>> mh.heads.metrics.loss(output.logits, batches[0]).mean().round(1)  # it was 0
      Array(3., dtype=float32)
    """
    counts = [len(layer.names) for layer in models.heads_of_layers(config)]
    if (got := [len(row) for row in gates]) != counts:
        raise ValueError(f"gates must have {counts} heads, got {got}.")

    def with_gates(i: int | slice, axis: anatomy.Axis, leaf: Any) -> Any:
        if not axis.is_read:
            return leaf
        factors = np.stack(gates[i]) if isinstance(i, slice) else gates[i]
        return anatomy.scaled(leaf, axis, factors)

    return _changed(params, config, (anatomy.HEADS,), with_gates)


def _changed(
    params: Params,
    config: models.ModelConfig,
    holders: Sequence[str],
    change: Callable[[Any, anatomy.Axis, Any], Any],
) -> dict[str, dict[str, Any]]:
    """Changes all arrays of the parameters that have an axis of `holders`."""
    # `change(layer, axis, array)` returns None to remove an array; the layer is a slice
    # if layers are stacked.
    counts = [len(layer.names) for layer in models.heads_of_layers(config)]
    result, changed, indices = {}, set(), range(len(counts))
    for module, leaves in params.items():
        layer = models.part_of(config, module)
        is_stacked = isinstance(layer, slice)
        if layer is not None and not is_stacked and layer not in indices:
            raise ValueError(f"params must have {len(counts)} layers, got {module!r}.")
        result[module] = {}
        for name, leaf in leaves.items():
            axis = None if layer is None else anatomy.axis_of(module, name)
            if axis and axis.holds in holders:
                changed.update(indices[layer] if is_stacked else [layer])
                leaf = change(layer, axis, leaf)
            if leaf is not None:
                result[module][name] = leaf
    missing = {i for i, count in enumerate(counts) if count} - changed
    if missing:
        raise ValueError(
            f"params must have {holders[0]} in each layer, in modules named as "
            f"models.build names them; layers {sorted(missing)} have none, got modules "
            f"{', '.join(params) or 'none'}."
        )
    return {module: leaves for module, leaves in result.items() if leaves}


def _indices(row: Sequence[int] | np.ndarray) -> list[int]:
    row = np.asarray(row)
    if row.ndim != 1:
        raise ValueError(f"keep must have a list for each layer, got {row.tolist()!r}.")
    return sorted(np.flatnonzero(row).tolist() if row.dtype == bool else row.tolist())


def kept_names(keep: Sequence[Sequence[int]], layers: Sequence[Any]) -> list[list[int]]:
    """Lists the heads to keep in each layer, or raises ValueError."""
    if len(keep) != len(layers):
        expected = f"an entry for each of the {len(layers)} layers"
        raise ValueError(f"keep must have {expected}, got {len(keep)}.")
    result = [_indices(row) for row in keep]
    for names, layer in zip(result, layers, strict=True):
        if set(names) - set(layer.names) or len(set(names)) < len(names):
            raise ValueError(
                f"layer {layer.address} must keep some of its heads "
                f"{list(layer.names)}, each once, got {names}."
            )
    return result
