"""How differently two heads attend.

`B...` batch axes, H and H' heads, T query positions, S key positions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku import tiles
from mha_haiku.attention import sweep, views

Array = jax.Array


def check(map_shape: tuple[int, ...], other_shape: tuple[int, ...]):
    """Raises ValueError unless two maps agree on batch axes, T and S."""
    mine, theirs = ((*x[:-3], *x[-2:]) for x in (map_shape, other_shape))
    if mine != theirs:
        raise ValueError(
            "maps that are compared must have the same batch axes, T and S; got "
            f"shapes {map_shape} and {other_shape}."
        )


@functools.partial(jax.jit, static_argnames="sizes")
def divergence(attention_map: Any, other: Any, *, sizes: sweep.Sizes) -> Array:
    """Returns the mean Jensen-Shannon divergences; see `AttentionMap.divergence`.

    The divergence of two rows is the entropy of their mean less the mean of their
    entropies; the first adds up over tiles of all heads, the other over each head's.
    """
    *batch_shape, _, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(num_queries, num_keys)

    def of_example(example, head):
        del head  # all of them, side by side
        heads, others = (_heads_of(x, example) for x in (attention_map, other))

        def of_rows(rows, fresh_from, total):
            def of_tile(columns, seen_from, entropies):
                logs = tuple(
                    jax.vmap(lambda head: head.log_weights(rows, columns, seen_from))(x)
                    for x in (heads, others)
                )
                return jax.tree.map(jnp.add, entropies, _entropies(*logs))

            shapes = (len(heads.query), len(others.query))
            of_heads, of_others = (
                jnp.zeros((count, rows.size), total.dtype) for count in shapes
            )
            of_means = jnp.zeros((*shapes, rows.size), total.dtype)
            of_heads, of_others, of_means = sweep.over_keys(
                of_tile,
                (of_heads, of_others, of_means),
                None,
                rows,
                num_keys,
                sizes.columns,
            )
            found = of_means - (of_heads[:, None] + of_others[None, :]) / 2
            fresh = (rows.array() >= fresh_from)[None, None]
            counts = _both_see(heads, others, rows) & fresh
            return total + jnp.where(counts, found, 0).sum(-1)

        total = jnp.zeros((len(heads.query), len(others.query)), attention_map.dtype)
        total = sweep.over_rows(of_rows, total, num_queries, sizes.rows)
        counts = _both_see(heads, others, tiles.Span(0, num_queries)).sum(-1)
        return jnp.maximum(total, 0) / jnp.maximum(counts, 1)

    found = sweep.over_heads(of_example, batch_shape, 1, 1)
    return found.squeeze(len(batch_shape))


def _heads_of(attention_map, example) -> views.Head:
    """Returns the heads of one example as one pytree with an axis of heads."""
    numbers = jnp.arange(attention_map.shape[-3])
    return jax.vmap(lambda head: views.head_of(attention_map, example, head))(numbers)


def _entropies(logs, other_logs):
    """Returns entropies over keys: of heads, of other heads, of the means of pairs.

    Args:
      logs: `[H, R, C]` log weights.
      other_logs: `[H', R, C]`.
    """
    weights, others = jnp.exp(logs), jnp.exp(other_logs)

    def of_means(head):
        mean = (head[None] + others) / 2
        return -(mean * jnp.log(jnp.where(mean > 0, mean, 1))).sum(-1)

    return (
        -(weights * logs).sum(-1),
        -(others * other_logs).sum(-1),
        jax.lax.map(of_means, weights),
    )


def _both_see(heads, others, rows):
    """Returns which rows `[H, H', R]` see anything in both."""
    sees, others_see = (
        tiles.take(x.logsumexp, rows, -1) > -jnp.inf for x in (heads, others)
    )
    return sees[:, None] & others_see[None, :]
