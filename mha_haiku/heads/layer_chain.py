"""Chosen rows of the product of the layers' matrices, without making a matrix.

`B...` batch axes, T positions, H heads, V value size, R chosen rows, L layers. A
layer's matrix `[B..., T, T]` says how much of what enters at each position reaches each
position above. Row t of the product over layers is `((e_t^T A_L) ... A_2) A_1`: a
vector goes down through the layers, and a layer is a function that multiplies vectors
by its transposed matrix.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import attention, models, tiles

Array = jax.Array
Rows = int | tiles.Index

# Multiplies columns [B..., T, R] by the transposed matrix of a layer.
Layer = Callable[[Array], Array]


def chained(layers: Sequence[Layer], start: Array, *, per_layer: bool) -> Array:
    """Returns rows of the product of the layers' matrices.

    Args:
      layers: From the first layer to the last.
      start: `[B..., T, R]`, the weights of the rows of the product: a column with a
        single 1 chooses one row.
      per_layer: Whether to return the products up to each layer too; in one pass.

    Returns:
      `[B..., R, T]`; with `per_layer` `[L, B..., R, T]`, entry l being the product of
      layers 0 to l.
    """
    # Going down, each layer adds its own start columns: those that began at layer l end
    # as the product of layers 0 to l.
    columns = start[..., :0]
    for i, layer in enumerate(reversed(layers)):
        if per_layer or i == 0:
            columns = jnp.concatenate([columns, start], axis=-1)
        columns = layer(columns)
    rows = jnp.swapaxes(columns, -1, -2)
    if not per_layer:
        return rows
    by_layer = (len(layers), start.shape[-1], start.shape[-2])
    rows = rows.reshape(*rows.shape[:-2], *by_layer)
    return jnp.moveaxis(rows, -3, 0)[::-1]


def mixed(
    attention_map: attention.AttentionMap,
    sizes: Array | None,
    residual: float,
    columns: Array,
) -> Array:
    """Returns a layer's transposed matrix times columns `[B..., T, R]`.

    The matrix is `residual I + (1 - residual) A`. A row of A is the sum over heads of
    weights times sizes, normalized to sum to 1. Where that sum is 0, and in a layer
    without heads, the row is that of I.

    Args:
      attention_map: The map of the layer.
      sizes: `[B..., S, H]`, by which weights are multiplied; None: by 1.
      residual: Share of the residual connection.
      columns: The columns.
    """
    if not attention_map.shape[-3]:
        return columns

    def gather(columns):
        received = attention_map.apply_transposed(columns[..., None, :])
        if sizes is not None:
            received = received * sizes[..., None]
        return received.sum(-2)

    return normalized(_row_totals(attention_map, sizes), gather, residual, columns)


def normalized(totals: Array, gather: Layer, residual: float, columns: Array) -> Array:
    """Returns what `mixed` does, of any matrix whose rows are divided by their sums.

    Args:
      totals: `[B..., T]`, these sums.
      gather: Multiplies columns by the transposed matrix.
      residual: Share of the residual connection.
      columns: `[B..., T, R]`.
    """
    share = jnp.where(totals == 0, 0, 1 - residual)
    scaled = columns * (share / jnp.where(totals == 0, 1, totals))[..., None]
    return columns * (1 - share)[..., None] + gather(scaled)


def values_of(attention_map: attention.AttentionMap) -> Array:
    """Returns the values that each head reads, `[B..., S, H, V]`.

    Raises:
      ValueError: If the map has none.
    """
    if attention_map.value is None:
        raise ValueError(
            "maps must have values, as those of attend do; got one with value=None."
        )
    num_heads = attention_map.shape[-3]
    value = attention_map.value
    value = jnp.repeat(value, num_heads // value.shape[-2], axis=-2)
    return value.astype(attention_map.dtype)


def matrix(attention_map: attention.AttentionMap, residual: float) -> Array:
    """Returns the matrix `[B..., T, T]` of a layer that `mixed` uses for sizes of 1."""
    eye = jnp.eye(attention_map.shape[-1], dtype=attention_map.dtype)
    eye = jnp.broadcast_to(eye, (*attention_map.shape[:-3], *eye.shape))
    total = attention_map.weights().sum(-3)
    count = _row_totals(attention_map, None)[..., None]
    share = jnp.where(count == 0, 0, 1 - residual)
    return (1 - share) * eye + share * total / jnp.where(count == 0, 1, count)


def start_of(maps: Sequence[attention.AttentionMap], rows: Rows) -> Array:
    """Returns `[B..., T, R]`, a single 1 in each column at the position of the row.

    Args:
      maps: One per layer.
      rows: Positions; see `positions_of`.
    """
    rows = jnp.asarray(positions_of(maps, rows))
    return jax.nn.one_hot(rows, maps[0].shape[-1], axis=-2, dtype=maps[0].dtype)


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
    check_maps(maps)
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


def check_maps(maps: Sequence[attention.AttentionMap]) -> None:
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


def check_per_layer(name, given, maps) -> None:
    """Raises ValueError unless `given` is None or has an entry per layer."""
    if given is not None and len(given) != len(maps):
        raise ValueError(
            f"{name} must be of L = {len(maps)} layers, as maps are, got {len(given)}."
        )


def _row_totals(attention_map, sizes):
    """Returns the sum over keys and heads of each row of `mixed`, `[B..., T]`."""
    if sizes is None and attention_map.rows_sum_to != "1":
        return attention_map.row_sums().sum(-2)
    if sizes is None:  # known without a pass: a head's row sums to 1, or 0 if masked
        sees = attention_map.logsumexp != -jnp.inf
        return sees.sum(-2, dtype=attention_map.dtype)
    return attention_map.apply(sizes[..., None]).sum((-1, -2))
