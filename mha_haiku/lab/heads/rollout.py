"""Attention rollout: how much of an input reaches a position.

`B...` batch axes, T query positions, S = T key positions, H heads, R chosen rows, L
layers.

A layer's matrix `[B..., T, T]` says how much of its input at one position reaches its
output at another. Row t of the product over layers is `((e_t^T A_L) ... A_2) A_1`: R
vectors are multiplied by the layers from the top down, tile by tile, and no `[T, T]`
array is made. So memory is `O(H R T)` at any length.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, checks, models, tiles

Array = jax.Array
Maps = Sequence[attention.AttentionMap]
Rows = int | tiles.Index


def rollout(
    maps: Maps, rows: Rows, *, residual: float = 0.5, per_layer: bool = False
) -> Array:
    """Computes attention rollout: rows of the product of the layers' mean attention.

    A layer's matrix is `residual I + (1 - residual) A`, with A the mean of its heads;
    it is I in rows where the query is fully masked in all heads (padding), and in a
    layer without heads (all pruned). A head where the query is fully masked is excluded
    from the mean. So rows sum to 1; if the rows of maps do not, as with sinks, A is the
    sum over heads divided by its row sums. `rollout(maps[i : i + 1], rows, residual=0)`
    is the mean attention of layer i, except for such rows.

    Args:
      maps: One per layer, of shape (B..., H, T, T); H may differ.
      rows: Positions of the last layer: one, or R as a slice, a range, integers `[R]`,
        or `[B..., R]`, different for each example.
      residual: The share of the residual connection, in [0, 1).
      per_layer: Return the rollouts up to each layer, in a single pass.

    Returns:
      `[B..., R, T]`, the share of each input in each row; with `per_layer`
      `[L, B..., R, T]`, where entry l is the rollout through layers 0 to l.

    Raises:
      ValueError: If maps are not from one stack of self-attention over one input, there
        is no such row, or the residual is not in [0, 1).

    Source: Abnar and Zuidema 2020, eq. 1, https://arxiv.org/abs/2005.00928.

    Example:
      >>> maps = model.apply(params, None, tokens[:1], is_training=False).maps
      >>> np.asarray(mh.heads.rollout(maps, rows=-1)).round(2)
      array([[[0.  , 0.  , 0.06, 0.01, 0.19, 0.13, 0.06, 0.3 , 0.25]]],
            dtype=float32)
    """
    checks.fraction("residual", residual)
    rows = jnp.asarray(_positions(maps, rows))
    size, dtype = maps[0].shape[-1], maps[0].dtype
    start = jax.nn.one_hot(rows, size, axis=-2, dtype=dtype)  # a column per row

    # From the top down, each layer adds start columns: those that start at layer l end
    # as the product of layers 0 to l.
    columns = start[..., :0]
    for i in reversed(range(len(maps))):
        if per_layer or i == len(maps) - 1:
            columns = jnp.concatenate([columns, start], axis=-1)
        if maps[i].shape[-3]:
            columns = _mixed(maps[i], residual, columns)
    rows = jnp.swapaxes(columns, -1, -2)
    if not per_layer:
        return rows
    rows = rows.reshape(*rows.shape[:-2], len(maps), *start.shape[:-3:-1])
    return jnp.moveaxis(rows, -3, 0)[::-1]


def _positions(maps: Maps, rows: Rows) -> Array | np.ndarray:
    """Returns the positions `[B..., R]` that `rows` choose."""
    if not maps:
        raise ValueError("maps must have at least one layer, got none.")
    if isinstance(maps, models.Maps):
        raise ValueError(
            "maps must be from one stack of layers, got the maps of an "
            "encoder-decoder; pass output.maps.encoder."
        )
    shapes = [(*layer.shape[:-3], *layer.shape[-2:]) for layer in maps]
    if len(set(shapes)) > 1 or shapes[0][-1] != shapes[0][-2]:
        raise ValueError(
            "maps must be (B..., H, T, T) with the same B... and T in each layer, got "
            f"{', '.join(str(layer.shape) for layer in maps)}."
        )
    *batch_shape, _, size, _ = maps[0].shape
    shape = (-1,)
    if not isinstance(rows, slice | range):
        rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        if rows.ndim > 1 and rows.shape[:-1] != tuple(batch_shape):
            expected = f"[R] or [B..., R] with B... = {tuple(batch_shape)}"
            raise ValueError(f"rows must be {expected}, got shape {rows.shape}.")
        shape, rows = rows.shape or (1,), rows.reshape(-1)
    positions = tiles.positions(rows, size).reshape(shape)
    if positions.ndim == 1:
        positions = positions.reshape(*(1,) * len(batch_shape), -1)
    xnp = jnp if isinstance(positions, jax.Array) else np
    return xnp.broadcast_to(positions, (*batch_shape, positions.shape[-1]))


def _mixed(
    attention_map: attention.AttentionMap, residual: float, columns: Array
) -> Array:
    """Multiplies columns by the transposed `residual I + (1 - residual) A`.

    A is the sum over heads, divided by its row sums; rows whose sum is 0 are taken from
    I.
    """
    if attention_map.rows_sum_to != "1":
        totals = attention_map.row_sums().sum(-2)
    else:  # known without a pass: a head's row sums to 1, or 0 if fully masked
        sees = attention_map.sees
        totals = sees.sum(-2, dtype=attention_map.dtype)
    is_empty = totals == 0
    share = jnp.where(is_empty, 0, 1 - residual)
    scaled = columns * (share / jnp.where(is_empty, 1, totals))[..., None]
    received = attention_map.apply_transposed(scaled[..., None, :]).sum(-2)
    return columns * (1 - share)[..., None] + received
