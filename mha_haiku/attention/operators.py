"""An attention map as a linear operator, without its matrix.

`B...` batch axes, H heads, T query positions, S key positions, V size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku import tiles
from mha_haiku.attention import products, sweep, views

Array = jax.Array


def factor(map_shape: tuple[int, ...], x: Array, axis: int) -> Array:
    """Returns what a map is to be multiplied by.

    Args:
      map_shape: (B..., H, T, S).
      x: `[B..., S, H, V]` or `[B..., S, 1, V]`; likewise of T.
      axis: Of the map that is summed over: -1 for S, -2 for T.

    Raises:
      ValueError: If it does not fit.
    """
    x = jnp.asarray(x)
    *batch_shape, num_heads, _, _ = map_shape
    name = {-2: "T", -1: "S"}[axis]
    allowed = [(*batch_shape, map_shape[axis], heads) for heads in (num_heads, 1)]
    if x.shape[:-1] not in allowed:
        raise ValueError(
            f"the array must be [B..., {name}, H, V] or [B..., {name}, 1, V], "
            f"which is {allowed[0]} and V here; got shape {x.shape}."
        )
    return x


@functools.partial(jax.jit, static_argnames="sizes")
def apply(attention_map: Any, x: Array, *, sizes: sweep.Sizes) -> Array:
    """Returns the map times `x`; see `AttentionMap.apply`."""
    num_queries, num_keys = attention_map.shape[-2:]

    def of_rows(view, own, width, rows, fresh_from, outputs):
        del fresh_from

        def of_tile(columns, seen_from, total):
            weights = view.weights(rows, columns, seen_from)
            return total + weights @ tiles.take(own, columns, 0)

        total = jnp.zeros((rows.size, own.shape[-1]), own.dtype)
        total = sweep.over_keys(of_tile, total, view.mask, rows, num_keys, width)
        return lax.dynamic_update_slice_in_dim(outputs, total, rows.start, 0)

    return _product(attention_map, x, of_rows, num_queries, sizes)


@functools.partial(jax.jit, static_argnames="sizes")
def apply_transposed(attention_map: Any, y: Array, *, sizes: sweep.Sizes) -> Array:
    """Returns the transposed map times `y`; see `AttentionMap.apply_transposed`."""
    num_keys = attention_map.shape[-1]

    def of_rows(view, own, width, rows, fresh_from, outputs):
        fresh = rows.array() >= fresh_from
        of_block = jnp.where(fresh[:, None], tiles.take(own, rows, 0), 0)

        def of_tile(columns, seen_from, outputs):
            weights = view.weights(rows, columns, seen_from)
            part = products.gather(weights[None], of_block[:, None], 1)[:, 0]
            return tiles.add(outputs, part, columns.start, 0)

        return sweep.over_keys(of_tile, outputs, view.mask, rows, num_keys, width)

    return _product(attention_map, y, of_rows, num_keys, sizes)


def _product(attention_map, x, of_rows, size, sizes):
    """Returns `[B..., size, H, V]`, what the blocks of rows of each head give.

    Args:
      attention_map: The map.
      x: What it is multiplied by.
      of_rows: Called as `of_rows(view, own, width, rows, fresh_from, outputs)` with a
        head, its part of `x`, the width of tiles, and as `sweep.over_rows` calls.
      size: Positions of the outputs.
      sizes: Of the tiles.
    """
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(num_queries, num_keys)
    x = x.astype(attention_map.dtype)

    def of_head(example, head):
        view = views.head_of(attention_map, example, head)
        own = _own(x, example, head)
        body = functools.partial(of_rows, view, own, sizes.columns)
        outputs = jnp.zeros((size, own.shape[-1]), own.dtype)
        return sweep.over_rows(body, outputs, num_queries, sizes.rows)

    outputs = sweep.over_heads(of_head, batch_shape, num_heads, sizes.heads)
    return jnp.moveaxis(outputs, -3, -2)


def _own(x, example, head):
    """Returns the `[S, V]` of `[B..., S, H, V]`, or of one for all heads."""
    x = tiles.at_batch(x, example)
    return x[:, 0] if x.shape[1] == 1 else x[:, head]
