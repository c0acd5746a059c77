"""Attention and its map, by the definition; read this file first.

`B...` batch axes, T query positions, S key positions, H query heads, G key/value heads
(G divides H), K query/key size and V value size per head. All implementations give
these numbers for finite inputs, at a different cost, and are tested against them;
`inputs.py` describes how they treat NaN in masked places.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    query: Float[Array, "*B T H K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S G V"],
    allowed: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "*B T H V"], Float[Array, "*B H T S"], Float[Array, "*B H T"]]:
    """Computes `softmax(query key / sqrt(K) + bias) value`, weights and logsumexp.

    Each key/value head serves H / G consecutive query heads. The logsumexp is in nats.
    A query that may attend to nothing has values and weights of 0, and a logsumexp of
    -inf.

    Args:
      allowed: Broadcasts to `[B..., H, T, S]`; True means "may attend".
      bias: Broadcasts to the same shape.

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
