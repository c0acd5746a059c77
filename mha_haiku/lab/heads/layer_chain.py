"""Chosen rows of the product of the layers' matrices, without making a matrix.

`B...` batch axes, T positions, H heads, V value size, R chosen rows, L layers. A
layer's matrix `[B..., T, T]` says how much of what enters at each position reaches each
position above. Row t of the product over layers is `((e_t^T A_L) ... A_2) A_1`: a
vector goes down through the layers, and a layer is a function that multiplies vectors
by its transposed matrix.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention, models, tiles

Array = jax.Array
Rows = int | tiles.Index

# Multiplies columns `[B..., T, R]` by the transposed matrix of a layer: a function of
# its map, of what is given for it, and of the columns.
Layer = Callable[[attention.AttentionMap, Any, Array], Array]


def chained(
    layer: Layer,
    maps: Sequence[attention.AttentionMap],
    rows: Rows,
    *,
    per_layer: bool,
    **given: Sequence[Any] | None,
) -> Array:
    """Returns rows of the product of the layers' matrices.

    A layer without heads (all pruned) passes everything on.

    Args:
      layer: The matrices.
      maps: One per layer, from the first to the last.
      rows: Which rows of the product; see `positions_of`.
      per_layer: Whether to return the products up to each layer too; in one pass.
      **given: One argument, what is given for each layer; None: nothing.

    Returns:
      `[B..., R, T]`; with `per_layer` `[L, B..., R, T]`, entry l being the product of
      layers 0 to l.

    Raises:
      ValueError: If maps or rows do not fit, or something is given for other layers.
    """
    rows = jnp.asarray(positions_of(maps, rows))
    size, dtype = maps[0].shape[-1], maps[0].dtype
    start = jax.nn.one_hot(rows, size, axis=-2, dtype=dtype)  # a column for each row
    ((name, given),) = given.items() or [("", None)]
    if given is not None and len(given) != len(maps):
        raise ValueError(
            f"{name} must be of L = {len(maps)} layers, as maps are, got {len(given)}."
        )
    given = given or [None] * len(maps)
    # Going down, each layer adds its own start columns: those that began at layer l end
    # as the product of layers 0 to l.
    columns = start[..., :0]
    for i in reversed(range(len(maps))):
        if per_layer or i == len(maps) - 1:
            columns = jnp.concatenate([columns, start], axis=-1)
        if maps[i].shape[-3]:
            columns = layer(maps[i], given[i], columns)
    rows = jnp.swapaxes(columns, -1, -2)
    if not per_layer:
        return rows
    by_layer = (len(maps), start.shape[-1], start.shape[-2])
    rows = rows.reshape(*rows.shape[:-2], *by_layer)
    return jnp.moveaxis(rows, -3, 0)[::-1]


def mixed(
    totals: Array, gather: Callable[[Array], Array], residual: float, columns: Array
) -> Array:
    """Returns the transposed matrix of a layer times columns `[B..., T, R]`.

    The matrix is `residual I + (1 - residual) A`. Rows of A are divided by their sums;
    where a sum is 0, the row is taken from I.

    Args:
      totals: `[B..., T]`, the sums of rows.
      gather: Multiplies columns by A transposed, before that division.
      residual: Share of the residual connection.
      columns: The columns.
    """
    share = jnp.where(totals == 0, 0, 1 - residual)
    scaled = columns * (share / jnp.where(totals == 0, 1, totals))[..., None]
    return columns * (1 - share)[..., None] + gather(scaled)


def values_of(attention_map: attention.AttentionMap) -> Array:
    """Returns the values that each head reads, `[B..., S, H, V]`."""
    if attention_map.value is None:
        raise ValueError(
            "maps must have values, as those of attend do; got one with value=None."
        )
    num_heads = attention_map.shape[-3]
    value = attention_map.value
    value = jnp.repeat(value, num_heads // value.shape[-2], axis=-2)
    return value.astype(attention_map.dtype)


def positions_of(maps: Sequence[attention.AttentionMap], rows: Rows) -> Array:
    """Returns the chosen positions, `[B..., R]`.

    Args:
      maps: One per layer, of self-attention.
      rows: A position; or R of them as a slice, a range or integers `[R]`; or integers
        `[B..., R]`, different for each example. Negative ones count from the end if
        they are known when tracing.

    Raises:
      ValueError: If maps or rows do not fit.
    """
    _check_maps(maps)
    *batch_shape, _, size, _ = maps[0].shape
    shape = (-1,)
    if not isinstance(rows, slice | range):
        rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
        if rows.ndim > 1 and rows.shape[:-1] != tuple(batch_shape):
            raise ValueError(
                "rows must be [R] or [B..., R] with B... = "
                f"{tuple(batch_shape)}, got shape {rows.shape}."
            )
        shape, rows = rows.shape or (1,), rows.reshape(-1)
    positions = tiles.positions(rows, size).reshape(shape)
    if positions.ndim == 1:
        positions = positions.reshape(*(1,) * len(batch_shape), -1)
    xnp = jnp if isinstance(positions, jax.Array) else np
    return xnp.broadcast_to(positions, (*batch_shape, positions.shape[-1]))


def _check_maps(maps: Sequence[attention.AttentionMap]) -> None:
    """Raises ValueError unless maps are of layers of self-attention over one input."""
    if not maps:
        raise ValueError("maps must have at least one layer, got none.")
    if isinstance(maps, models.Maps):
        raise ValueError(
            "maps must be of one stack of layers, got those of an encoder-decoder; "
            "output.maps.encoder are such."
        )
    shapes = [(*layer.shape[:-3], *layer.shape[-2:]) for layer in maps]
    if len(set(shapes)) > 1 or shapes[0][-1] != shapes[0][-2]:
        raise ValueError(
            "maps must be (B..., H, T, T) with the same B... and T in each layer, got "
            f"{', '.join(str(layer.shape) for layer in maps)}."
        )
