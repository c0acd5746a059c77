"""Attention and its map, as the definition has them: read this file first.

`B...` batch axes, T query positions, S key positions, H query heads, G key/value heads
(G divides H), K query/key size and V value size per head. All implementations give
these numbers, at another cost, and are tested against them.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def attention(
    query: Array,
    key: Array,
    value: Array,
    allowed: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Returns `softmax(query key / sqrt(K) + bias) value`, its weights, and logsumexp.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`; each head of G serves H / G query heads that follow.
      value: `[B..., S, G, V]`.
      allowed: Booleans that broadcast to `[B..., H, T, S]`: True means "may attend".
      bias: Floats that broadcast to the same shape.

    Returns:
      Values `[B..., T, H, V]`, weights `[B..., H, T, S]`, and the logsumexp of scores
      `[B..., H, T]` in nats. A query that may attend to nothing has values and weights
      of 0, and -inf.

    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762.
    """
    groups = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
    scores = jnp.einsum("...thk,...shk->...hts", query, key) / query.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    scores = scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)

    largest = scores.max(-1, keepdims=True, initial=-jnp.inf)
    sees_any = largest > -jnp.inf
    masses = jnp.exp(scores - jnp.where(sees_any, largest, 0))
    total = jnp.where(sees_any, masses.sum(-1, keepdims=True), 1)
    weights = masses / total
    logsumexp = jnp.where(sees_any, largest + jnp.log(total), -jnp.inf)
    values = jnp.einsum("...hts,...shv->...thv", weights, value)
    return values, weights, logsumexp[..., 0]
