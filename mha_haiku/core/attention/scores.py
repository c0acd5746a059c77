"""How well a query and a key match: scaled dot products, and any function of both.

A score is a callable pytree from `[B..., R, H, K]` and `[B..., C, G, K]` to `[B..., H,
R, C]`, float32 or, for float64 inputs, float64.
"""

import abc
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention import products

Array = jax.Array


class Score(tiles.Part, abc.ABC):
    """Scores of all pairs of R queries and C keys; a pytree.

    Its arrays have the axes of `aligned`: `[B..., H, ...]`, where an axis of
    size 1 stands for any. A score of your own is a function, where it has nothing to
    train, or a class such as this one, of minus the squared distances of queries and
    keys, at a rate for each head; it is differentiated with respect to the rates, too:

        from mha_haiku.core import tiles
        from mha_haiku.core.attention import Score, attend
        from mha_haiku.core.attention.scores import repeat_heads

        @tiles.pytree
        class Distance(Score):
            rate: jax.Array = tiles.array("H")  # [H]

            def __call__(self, query, key):
                key = repeat_heads(key, query.shape[-2])  # of grouped heads
                apart = query[..., :, None, :, :] - key[..., None, :, :, :]
                squares = jnp.moveaxis((apart**2).sum(-1), -1, -3)  # [B..., H, R, C]
                rate = self.aligned(query.ndim - 3).rate  # [1..., H]
                return -rate[..., None, None] * squares

        attend(query, key, value, score=Distance(jnp.ones(4)))

    Dense attention calls a score with all batch axes, the tile engine with one head of
    one example and no batch axes: hence `...` and `aligned` above.
    """

    @abc.abstractmethod
    def __call__(
        self, query: Float[Array, "*B R H K"], key: Float[Array, "*B C G K"]
    ) -> Float[Array, "*B H R C"]:
        """Computes the scores."""

    def gradients(
        self,
        query: Float[Array, "*B R H K"],
        key: Float[Array, "*B C G K"],
        cotangent: Float[Array, "*B H R C"],
    ) -> tuple[Float[Array, "*B R H K"], Float[Array, "*B C G K"], "Score"]:
        """Computes the gradients of the query, the key and the score itself."""
        _, pullback = jax.vjp(lambda q, k, score: score(q, k), query, key, self)
        return pullback(cotangent)

    def check(self, num_heads: int, key_size: int):
        """Raises ValueError where the score does not fit attention of these sizes."""


ScoreFunction = Callable[[Array, Array], Array]


def as_score(value: Score | ScoreFunction | None) -> Score:
    """Converts a score, a function, or None to a score.

    The function gets the queries `[R, K]` and keys `[C, K]` of one head, and returns
    `[R, C]`. Arrays that it closes over are constants; those to train are fields of a
    class, see `Score`.

    """
    if value is None:
        return dot_product()
    if not isinstance(value, (Score, type)) and callable(value):
        if getattr(value, "__annotations__", {}).get("return") is Score:
            raise TypeError(
                f"score must be what {value.__name__} returns: {value.__name__}(...)."
            )
        return OfFunction(value)
    if not isinstance(value, Score):
        raise TypeError(
            "score must be None, a function of queries and keys, or a Score, as "
            f"dot_product() returns; got {checks.shown(value)}."
        )
    return tiles.checked_pytree("score", value)


def dot_product(scale: float | None = None, soft_cap: float | None = None) -> Score:
    """Makes the score `scale * query . key`, capped smoothly at +-`soft_cap`.

    Args:
      scale: Scale of the scores, at least 0; None means 1 / sqrt(K).
      soft_cap: The score becomes `soft_cap * tanh(score / soft_cap)`; None: no cap.

    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762; the cap: Gemma
    Team 2024, section 2, https://arxiv.org/abs/2408.00118.
    """
    if scale is not None:
        checks.non_negative_number("scale", scale)
    if soft_cap is not None:
        checks.positive_number("soft_cap", soft_cap)
    return DotProduct(scale, soft_cap)


@tiles.pytree
class DotProduct(Score):
    """`scale * query . key`."""

    scale: float | None = tiles.static()
    soft_cap: float | None = tiles.static()

    def __call__(self, query, key):
        scale = self.scale_of(query.shape[-1])
        if query.dtype == products.accumulation_dtype(query.dtype):
            # T K products in place of T S; lower precisions would lose digits by it.
            query, scale = query * scale, 1
        scores = products.pair(query, key)
        scores = scores * scale if scale != 1 else scores
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def gradients(self, query, key, cotangent):
        scale = self.scale_of(query.shape[-1])
        if self.soft_cap is not None:
            capped = self(query, key) / self.soft_cap
            cotangent = chained(cotangent, 1 - capped**2)
        query_grad = products.mix(cotangent, key) * scale
        key_grad = products.gather(cotangent, query, key.shape[-2]) * scale
        return query_grad.astype(query.dtype), key_grad.astype(key.dtype), self

    def scale_of(self, size: int) -> float:
        return 1 / math.sqrt(size) if self.scale is None else self.scale


@tiles.pytree
class OfFunction(Score):
    """What a function of the queries and keys of one head says."""

    function: ScoreFunction = tiles.static()

    def __call__(self, query, key):
        of_heads = jax.vmap(self._of_head, in_axes=(-2, -2))
        for _ in range(query.ndim - 3):
            of_heads = jax.vmap(of_heads)
        return of_heads(query, repeat_heads(key, query.shape[-2]))

    def _of_head(self, query, key):
        scores = self.function(query, key)
        wanted = (len(query), len(key))
        if jnp.shape(scores) != wanted:
            raise ValueError(
                f"score must return [R, C], here {wanted}, for queries {query.shape} "
                f"and keys {key.shape}, got {jnp.shape(scores)}."
            )
        return scores.astype(products.accumulation_dtype(query.dtype))


def repeat_heads(
    key: Float[Array, "*B S G K"], num_heads: int
) -> Float[Array, "*B S H K"]:
    """Repeats each head H / G times."""
    num_key_heads = key.shape[-2]
    if num_key_heads == num_heads:
        return key
    return jnp.repeat(key, num_heads // num_key_heads, axis=-2)


def chained(cotangent: Array, slope: Array) -> Array:
    """Multiplies cotangents by slopes, 0 for masked pairs even of NaN scores."""
    return jnp.where(cotangent == 0, 0, cotangent * slope)
