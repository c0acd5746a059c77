"""Additive and cosine scores, and scores that are logs of sigmoids and of kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention import products, scores

Array = jax.Array


def additive(weight: Float[Array, "H K"]) -> scores.Score:
    """Makes the score `weight . tanh(query + key)`.

    Source: Bahdanau et al. 2015, appendix A.1.2, https://arxiv.org/abs/1409.0473.
    """
    if jnp.ndim(weight) != 2:
        raise ValueError(f"weight must be [H, K], got shape {jnp.shape(weight)}.")
    return Additive(weight)


def cosine(scale: Float[Array, " H"] | float = 10.0) -> scores.Score:
    """Makes the score `scale * cos(query, key)`, which no vector length changes.

    Source: Henry et al. 2020, eq. 4, https://arxiv.org/abs/2010.04245; a scale per
    head: Liu et al. 2022, eq. 2, https://arxiv.org/abs/2111.09883.
    """
    scale = jnp.asarray(scale, float)
    if scale.ndim > 1:
        raise ValueError(f"scale must be [H] or a number, got shape {scale.shape}.")
    return Cosine(jnp.atleast_1d(scale))


def sigmoid(scale: float | None = None, offset: float = 0.0) -> scores.Score:
    """Makes the score `log(sigmoid(scale * query . key + offset))`.

    With `normalizers.unnormalized()` the weights are these sigmoids themselves, each by
    itself: sigmoid attention.

    Args:
      scale: Scale of the scores, at least 0; None means 1 / sqrt(K).
      offset: -log(S) lets the weights of a row sum to about 1 at the start.

    Source: Ramapuram et al. 2024, section 3, https://arxiv.org/abs/2409.04431.
    """
    if scale is not None:
        checks.non_negative_number("scale", scale)
    checks.number("offset", offset)
    return Sigmoid(scale, offset)


def linear() -> scores.Score:
    """Makes the score `log(feature(query) . feature(key))`, `feature = elu + 1`.

    Weights are then these products, over their sum or, with
    `normalizers.unnormalized()`, as they are: linear attention, computed pair by pair.

    Source: Katharopoulos et al. 2020, section 3.2, https://arxiv.org/abs/2006.16236.
    """
    return Linear()


@tiles.pytree
class Additive(scores.Score):
    """`weight . tanh(query + key)`, in O(R C H K) memory; the weight is `[H, K]`."""

    weight: Array = tiles.array("H.")

    def __call__(self, query, key):
        dtype = products.accumulation_dtype(query.dtype)
        key = scores.repeat_heads(key, query.shape[-2])
        pairs = query[..., :, None, :, :].astype(dtype) + key[..., None, :, :, :]
        weight = self.aligned(query.ndim - 3).weight.astype(dtype)
        return jnp.moveaxis(
            (jnp.tanh(pairs) * weight[..., None, None, :, :]).sum(-1), -1, -3
        )

    def check(self, num_heads, key_size):
        wanted = (*self.weight.shape[:-2], num_heads, key_size)
        tiles.check_axes("weight", self.weight, wanted, "[H, K]")


@tiles.pytree
class Cosine(scores.Score):
    """`scale * cos(query, key)`; the scale is `[H]` or `[B..., H]`, H may be 1."""

    scale: Array = tiles.array("H")

    def __call__(self, query, key):
        scale = self.aligned(query.ndim - 3).scale[..., None, None]
        cosines = products.pair(_directions(query), _directions(key))
        return cosines * scale.astype(cosines.dtype)

    def check(self, num_heads, key_size):
        if self.scale.shape[-1] not in (1, num_heads):
            wanted = (*self.scale.shape[:-1], num_heads)
            tiles.check_axes("scale", self.scale, wanted, "[H]")


def _directions(x: Array) -> Array:
    """Scales vectors to length 1 in the dtype of scores; 0 stays 0."""
    x = x.astype(products.accumulation_dtype(x.dtype))
    size = jnp.square(x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(size == 0, 1, size))


@tiles.pytree
class Sigmoid(scores.Score):
    """`log sigmoid(scale * query . key + offset)`."""

    scale: float | None = tiles.static()
    offset: float = tiles.static()

    def __call__(self, query, key):
        return jax.nn.log_sigmoid(self._inside(query, key))

    def gradients(self, query, key, cotangent):
        cotangent = scores.chained(cotangent, jax.nn.sigmoid(-self._inside(query, key)))
        return *scores.DotProduct(self.scale, None).gradients(query, key, cotangent)[
            :2
        ], self

    def _inside(self, query, key):
        return scores.DotProduct(self.scale, None)(query, key) + self.offset


@tiles.pytree
class Linear(scores.Score):
    """`log feature(query) . feature(key)`, features of which are `elu(x) + 1`."""

    def __call__(self, query, key):
        return jnp.log(self._kernel(_features(query), _features(key)))

    def gradients(self, query, key, cotangent):
        # The slope of a feature, 1 above 0 and exp(x) below, is min(feature, 1).
        own, its = _features(query), _features(key)
        cotangent = cotangent / self._kernel(own, its)
        query_grad = products.mix(cotangent, its) * jnp.minimum(own, 1)
        key_grad = products.gather(cotangent, own, key.shape[-2]) * jnp.minimum(its, 1)
        return query_grad.astype(query.dtype), key_grad.astype(key.dtype), self

    def _kernel(self, query, key):
        """Computes products `[B..., H, R, C]`, none too small to divide by."""
        kernel = products.pair(query, key)
        limits = jnp.finfo(kernel.dtype)
        return jnp.maximum(kernel, limits.tiny / limits.eps)


def _features(x: Array) -> Array:
    x = x.astype(products.accumulation_dtype(x.dtype))
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
