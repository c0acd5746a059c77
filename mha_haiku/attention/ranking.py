"""The largest weights of each row of a map, and where they are.

`B...` batch axes, H heads, T query positions, S key positions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.attention import sweep, views

Array = jax.Array


class Top(NamedTuple):
    """The largest weights of each row.

    Attributes:
      weights: `[B..., H, T, k]`, falling; 0 where a row sees fewer keys.
      positions: `[B..., H, T, k]` integers, their keys; -1 where a row sees fewer.
    """

    weights: Array
    positions: Array


@functools.partial(jax.jit, static_argnames=("k", "sizes"))
def top(attention_map: Any, *, k: int, sizes: sweep.Sizes) -> Top:
    """Returns the k largest weights of each row; see `AttentionMap.top`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(num_queries, num_keys)
    dtype = attention_map.dtype

    def of_head(example, head):
        view = views.head_of(attention_map, example, head)

        def of_tile(rows, columns, seen_from, best):
            log_weights = view.log_weights(rows, columns, seen_from)
            found, where = lax.top_k(log_weights, min(k, columns.size))
            found = jnp.concatenate([best[0], found], axis=-1)
            where = jnp.concatenate([best[1], where + columns.start], axis=-1)
            found, chosen = lax.top_k(found, k)
            return found, jnp.take_along_axis(where, chosen, axis=-1)

        def of_rows(rows, fresh_from, outputs):
            del fresh_from
            best = (
                jnp.full((rows.size, k), 2 * views.HIDDEN, dtype),
                jnp.full((rows.size, k), -1, jnp.int32),
            )
            best = sweep.over_keys(
                functools.partial(of_tile, rows),
                best,
                view.mask,
                rows,
                num_keys,
                sizes.columns,
            )
            return tuple(
                lax.dynamic_update_slice_in_dim(x, new, rows.start, 0)
                for x, new in zip(outputs, best, strict=True)
            )

        outputs = (
            jnp.zeros((num_queries, k), dtype),
            jnp.zeros((num_queries, k), jnp.int32),
        )
        found, where = sweep.over_rows(of_rows, outputs, num_queries, sizes.rows)
        return Top(jnp.exp(found), jnp.where(found > views.HIDDEN / 2, where, -1))

    return sweep.over_heads(of_head, batch_shape, num_heads, sizes.heads)
