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


@functools.partial(jax.jit, static_argnames="sizes")
def apply(attention_map: Any, x: Array, *, sizes: sweep.Sizes) -> Array:
    """Returns the map times `x`; see `AttentionMap.apply`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(num_queries, num_keys)
    dtype = attention_map.dtype
    x = x.astype(dtype)

    def of_head(example, head):
        view = views.head_of(attention_map, example, head)
        own = _own(x, example, head)

        def of_rows(rows, fresh_from, outputs):
            del fresh_from

            def of_tile(columns, seen_from, total):
                weights = view.weights(rows, columns, seen_from)
                return total + weights @ tiles.take(own, columns, 0)

            total = sweep.over_keys(
                of_tile,
                jnp.zeros((rows.size, own.shape[-1]), dtype),
                view.mask,
                rows,
                num_keys,
                sizes.columns,
            )
            return lax.dynamic_update_slice_in_dim(outputs, total, rows.start, 0)

        outputs = jnp.zeros((num_queries, own.shape[-1]), dtype)
        return sweep.over_rows(of_rows, outputs, num_queries, sizes.rows)

    outputs = sweep.over_heads(of_head, batch_shape, num_heads, sizes.heads)
    return jnp.moveaxis(outputs, -3, -2)


@functools.partial(jax.jit, static_argnames="sizes")
def apply_transposed(attention_map: Any, y: Array, *, sizes: sweep.Sizes) -> Array:
    """Returns the transposed map times `y`; see `AttentionMap.apply_transposed`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(num_queries, num_keys)
    dtype = attention_map.dtype
    y = y.astype(dtype)

    def of_head(example, head):
        view = views.head_of(attention_map, example, head)
        own = _own(y, example, head)

        def of_rows(rows, fresh_from, total):
            fresh = rows.array() >= fresh_from
            of_block = jnp.where(fresh[:, None], tiles.take(own, rows, 0), 0)

            def of_tile(columns, seen_from, total):
                weights = view.weights(rows, columns, seen_from)
                part = products.gather(weights[None], of_block[:, None], 1)[:, 0]
                part += tiles.take(total, columns, 0)
                return lax.dynamic_update_slice_in_dim(total, part, columns.start, 0)

            return sweep.over_keys(
                of_tile, total, view.mask, rows, num_keys, sizes.columns
            )

        total = jnp.zeros((num_keys, own.shape[-1]), dtype)
        return sweep.over_rows(of_rows, total, num_queries, sizes.rows)

    outputs = sweep.over_heads(of_head, batch_shape, num_heads, sizes.heads)
    return jnp.moveaxis(outputs, -3, -2)


def _own(x, example, head):
    """Returns the `[S, V]` of `[B..., S, H, V]`, or of one for all heads."""
    x = tiles.at_batch(x, example)
    return x[:, 0] if x.shape[1] == 1 else x[:, head]
