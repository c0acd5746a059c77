"""Scores of a query and a key: dot products, or any function of both.

A score is a callable pytree from `[B..., R, H, K]` and `[B..., C, G, K]` to `[B..., H,
R, C]`, float32 or, for float64 inputs, float64.
"""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention import products


class Score(tiles.Part, abc.ABC):
    """Scores of all pairs of R queries and C keys; a pytree.

    Its arrays have the axes of `aligned`: `[B..., H, ...]`, where an axis of size 1
    broadcasts. A custom score is a function if it has no parameters, or a class such as
    the following: minus the squared distances of queries and keys, with a rate per
    head. It is also differentiated with respect to the rates.

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

    map_of: ClassVar[str] = ""  # in the repr of a map, instead of its query and key

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

    def check(self, num_heads: int, key_size: int) -> None:
        """Raises ValueError if the score does not fit attention of these sizes."""

    def sees(
        self, logsumexp: Float[Array, "*B H T"], weighting: Any
    ) -> Bool[Array, "*B H T"]:
        """Finds the queries of a map with this score that see any key."""
        del weighting
        return logsumexp != -jnp.inf

    is_kept: ClassVar[bool] = True  # whether a map with this score gives its scores

    def weights(self, relative: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes weights from scores less the log sum of their row."""
        return jnp.exp(relative)

    def log_weights(self, relative: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes the logs of `weights`, -inf where these are 0."""
        return relative


ScoreFunction = Callable[[Array, Array], Array]


def as_score(value: Score | ScoreFunction | None) -> Score:
    """Converts a score, a function, or None to a score.

    The function gets the queries `[R, K]` and keys `[C, K]` of one head, and returns
    `[R, C]`. Arrays that it closes over are constants; parameters to train are fields
    of a class, see `Score`.
    """
    if value is None:
        return dot_product()
    if not isinstance(value, (Score, type)) and callable(value):
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
      soft_cap: The score becomes `soft_cap * tanh(score / soft_cap)`. Defaults to no
        cap.

    Raises:
      ValueError: If `scale` is negative, or `soft_cap` not above 0.

    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762; the cap: Gemma
    Team 2024, section 2, https://arxiv.org/abs/2408.00118.
    """
    if scale is not None:
        checks.non_negative_number("scale", scale)
    if soft_cap is not None:
        checks.positive_number("soft_cap", soft_cap)
    return DotProduct(scale, soft_cap)


def sigmoid(scale: float | None = None, offset: float = 0.0) -> Score:
    """Makes the score `log(sigmoid(scale * query . key + offset))`.

    With `normalizers.unnormalized()` the weights are these sigmoids, independent of
    each other: sigmoid attention.

    Args:
      scale: Scale of the scores, at least 0; None means 1 / sqrt(K).
      offset: Added to the scaled scores; with -log(S) the weights of a row sum to about
        1 at initialization.

    Source: Ramapuram et al. 2024, section 3, https://arxiv.org/abs/2409.04431.
    """
    if scale is not None:
        checks.non_negative_number("scale", scale)
    checks.number("offset", offset)
    return Sigmoid(scale, offset)


@tiles.pytree
class DotProduct(Score):
    """`scale * query . key`."""

    scale: float | None = tiles.static()
    soft_cap: float | None = tiles.static()

    def __call__(self, query: Array, key: Array) -> Array:
        scale = self.scale_of(query.shape[-1])
        if query.dtype == products.accumulation_dtype(query.dtype):
            # T K products instead of T S; at lower precisions this would lose digits.
            query, scale = query * scale, 1
        scores = products.pair(query, key)
        scores = scores * scale if scale != 1 else scores
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def gradients(
        self, query: Array, key: Array, cotangent: Array
    ) -> tuple[Array, Array, Self]:
        scale = self.scale_of(query.shape[-1])
        if self.soft_cap is not None:
            capped = self(query, key) / self.soft_cap
            cotangent = chained(cotangent, 1 - capped**2)
        query_grad = products.mix(cotangent, key) * scale
        key_grad = products.mix_transposed(cotangent, query, key.shape[-2]) * scale
        return query_grad.astype(query.dtype), key_grad.astype(key.dtype), self

    def scale_of(self, size: int) -> float:
        return 1 / math.sqrt(size) if self.scale is None else self.scale


@tiles.pytree
class Sigmoid(Score):
    """`log sigmoid(scale * query . key + offset)`."""

    scale: float | None = tiles.static()
    offset: float = tiles.static()

    def __call__(self, query: Array, key: Array) -> Array:
        return jax.nn.log_sigmoid(self._inside(query, key))

    def gradients(
        self, query: Array, key: Array, cotangent: Array
    ) -> tuple[Array, Array, Self]:
        cotangent = chained(cotangent, jax.nn.sigmoid(-self._inside(query, key)))
        return *DotProduct(self.scale, None).gradients(query, key, cotangent)[:2], self

    def _inside(self, query: Array, key: Array) -> Array:
        return DotProduct(self.scale, None)(query, key) + self.offset


@tiles.pytree
class OfFunction(Score):
    """A score defined by a function of the queries and keys of one head."""

    function: ScoreFunction = tiles.static()

    def __call__(self, query: Array, key: Array) -> Array:
        of_heads = jax.vmap(self._of_head, in_axes=(-2, -2))
        for _ in range(query.ndim - 3):
            of_heads = jax.vmap(of_heads)
        return of_heads(query, repeat_heads(key, query.shape[-2]))

    def _of_head(self, query: Array, key: Array) -> Array:
        scores = self.function(query, key)
        shape = (len(query), len(key))
        if jnp.shape(scores) != shape:
            raise ValueError(
                f"score must return [R, C], here {shape}, for queries {query.shape} "
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
    """Multiplies cotangents by slopes; 0 for masked pairs, even with NaN scores."""
    return jnp.where(cotangent == 0, 0, cotangent * slope)
