"""How well a query and a key match: scaled dot products, or an additive score.

`...` leading axes, R queries, C keys, H query heads, G key heads (G divides H), K size
per head. A score is a callable pytree from `[..., R, H, K]` and `[..., C, G, K]` to
`[..., H, R, C]`, float32 or, for float64 inputs, float64.
"""

import math
from typing import Protocol

import jax
import jax.numpy as jnp

from mha_haiku import checks, tiles

Array = jax.Array


class Score(Protocol):
    """Scores of all pairs of R queries and C keys."""

    def __call__(self, query: Array, key: Array) -> Array:
        """Returns `[..., H, R, C]`."""

    def aligned(self, batch_ndim: int) -> "Score":
        """Returns the score with parameters that stand beside `[B..., T, H, K]`."""


def dot_product(scale: float | None = None, soft_cap: float | None = None) -> Score:
    """Returns the score `scale * query . key`, capped smoothly at +-`soft_cap`.

    Args:
      scale: Of at least 0; None means 1 / sqrt(K).
      soft_cap: The score becomes `soft_cap * tanh(score / soft_cap)`; None: no cap.

    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762; the cap: Gemma
    Team 2024, section 2, https://arxiv.org/abs/2408.00118.
    """
    if scale is not None:
        checks.non_negative_number("scale", scale)
    if soft_cap is not None:
        checks.positive_number("soft_cap", soft_cap)
    return DotProduct(scale, soft_cap)


def additive(weight: Array) -> Score:
    """Returns the score `weight . tanh(query + key)`.

    Args:
      weight: `[H, K]`.

    Source: Bahdanau et al. 2015, appendix A.1.2, https://arxiv.org/abs/1409.0473.
    """
    if jnp.ndim(weight) != 2:
        raise ValueError(f"weight must be [H, K], got shape {jnp.shape(weight)}.")
    return Additive(weight)


@tiles.pytree(meta=("scale", "soft_cap"))
class DotProduct:
    """`scale * query . key`."""

    scale: float | None
    soft_cap: float | None

    def __call__(self, query, key):
        num_heads, size = query.shape[-2:]
        scale = 1 / math.sqrt(size) if self.scale is None else self.scale
        dtype = accumulation_dtype(query.dtype)
        if query.dtype == dtype:
            query, scale = query * scale, 1  # fewer numbers than the scores
        # Axes are moved here, as XLA's own choice for the einsum is slower on the CPU.
        query, key = grouped_heads(query, key.shape[-2]), jnp.moveaxis(key, -2, -3)
        scores = jnp.einsum(
            "...grtk,...gsk->...grts", query, key, preferred_element_type=dtype
        )
        scores = scores.reshape(*scores.shape[:-4], num_heads, *scores.shape[-2:])
        scores = scores * scale if scale != 1 else scores
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def aligned(self, batch_ndim):
        """Returns itself: it has no arrays."""
        del batch_ndim
        return self


@tiles.pytree(data=("weight",))
class Additive:
    """`weight . tanh(query + key)`; the weight is `[H, K]` or `[B..., 1, H, K]`."""

    weight: Array

    def __call__(self, query, key):
        num_heads = query.shape[-2]
        wanted = (*self.weight.shape[:-2], *query.shape[-2:])
        tiles.check_axes("weight", self.weight, wanted, "[H, K]")
        dtype = accumulation_dtype(query.dtype)
        key = repeat_heads(key, num_heads)
        pairs = query[..., :, None, :, :].astype(dtype) + key[..., None, :, :, :]
        weight = self.aligned(query.ndim - 3).weight.astype(dtype)[..., None, :, :]
        return jnp.moveaxis((jnp.tanh(pairs) * weight).sum(-1), -1, -3)

    def aligned(self, batch_ndim):
        """Returns the score with the weight as `[B..., 1, H, K]`."""
        if self.weight.ndim == batch_ndim + 3:
            return self
        return Additive(
            self.weight.reshape((1,) * (batch_ndim + 1) + self.weight.shape)
        )


def accumulation_dtype(dtype) -> jnp.dtype:
    """Returns the dtype of scores and softmax: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def repeat_heads(key: Array, num_heads: int) -> Array:
    """Returns `[..., S, H, K]` from `[..., S, G, K]`, each head H / G times."""
    num_key_heads = key.shape[-2]
    if num_key_heads == num_heads:
        return key
    return jnp.repeat(key, num_heads // num_key_heads, axis=-2)


def grouped_heads(query: Array, num_key_heads: int) -> Array:
    """Returns `[..., G, H / G, T, K]` from `[..., T, H, K]`."""
    query = jnp.moveaxis(query, -2, -3)
    heads = num_key_heads, query.shape[-3] // num_key_heads
    return query.reshape(*query.shape[:-3], *heads, *query.shape[-2:])
