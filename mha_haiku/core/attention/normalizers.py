"""Denominators of the weights: the log of softmax's, and normalizers for others.

Implementations of attention support only softmax: they return values and the logsumexp
of each row of scores, the log of softmax's denominator. A normalizer is applied to the
result of any implementation: values are multiplied by the ratio of the two
denominators, and the weights of the map are `exp(score - log denominator)` as before.
JAX differentiates it automatically.
"""

import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import core
from jaxtyping import Array, Bool, Float

from mha_haiku.core import checks, tiles


class LogSum(NamedTuple):
    """The log of a sum of exponentials, as a float and its rounding error.

    With a largest score of 1e6 the log of the number of keys is below the spacing of
    float32, and `exp(score - logsumexp)` by itself would lose it entirely.
    """

    logsumexp: Float[Array, "..."]  # rounded; -inf for an empty sum
    remainder: Float[Array, "..."]  # to be added to `logsumexp`

    @classmethod
    def rounded(cls, logsumexp: "LogSum | Array") -> "LogSum":
        """Converts an array to a log sum whose rounding error is unknown."""
        if isinstance(logsumexp, LogSum):
            return logsumexp
        return cls(logsumexp, jnp.zeros_like(logsumexp))

    @classmethod
    def of(cls, largest: Float[Array, "..."], total: Float[Array, "..."]) -> "LogSum":
        """Adds the largest exponent and the log of the sum relative to it.

        A total of 0 is an empty sum.
        """
        is_empty = total == 0
        log_total = jnp.log(jnp.where(is_empty, 1, total))
        logsumexp = jnp.where(is_empty, -jnp.inf, largest + log_total)
        rounded = jnp.where(jnp.isfinite(logsumexp), logsumexp, 0)
        remainder = jnp.where(
            jnp.isfinite(logsumexp), log_total - (rounded - largest), 0
        )
        return cls(logsumexp, jax.lax.stop_gradient(remainder))

    def nan_where(self, is_nan: Bool[Array, "..."]) -> "LogSum":
        """Sets some of the sums to NaN."""
        return self._replace(logsumexp=jnp.where(is_nan, jnp.nan, self.logsumexp))

    def over(self, whole: "LogSum") -> Float[Array, "..."]:
        """Computes this sum as a share of a whole sum, 0 where that is empty."""
        is_empty = whole.logsumexp == -jnp.inf
        largest = jnp.where(is_empty, 0, whole.logsumexp)
        return jnp.exp((self.logsumexp - largest) + (self.remainder - whole.remainder))

    def plus(self, other: "LogSum") -> "LogSum":
        """Adds another sum."""
        largest = jnp.maximum(self.logsumexp, other.logsumexp)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
        ours, theirs = (jnp.exp((x - largest) + rest) for x, rest in (self, other))
        return LogSum.of(largest, ours + theirs)


class Normalizer(abc.ABC):
    """The denominator of the weights of a row; a pytree."""

    @property
    @abc.abstractmethod
    def rows_sum_to(self) -> str:
        """The sum of the weights of a row, in words."""

    @abc.abstractmethod
    def log_denominator(
        self, logsumexp: Float[Array, "*B H T"]
    ) -> Float[Array, "*B H T"]:
        """Computes the log of the denominators in nats, from a finite logsumexp."""

    def log_denominator_of(self, log_sum: LogSum) -> LogSum:
        """Computes `log_denominator` with its rounding error, to first order."""
        logsumexp, remainder = jax.jvp(self.log_denominator, log_sum[:1], log_sum[1:])
        return LogSum(logsumexp, jax.lax.stop_gradient(remainder))

    def __call__(
        self, values: Float[Array, "*B T H V"], log_sum: LogSum
    ) -> tuple[Float[Array, "*B T H V"], LogSum]:
        """Turns softmax's values and log denominators into this normalizer's.

        Rows without weights and rows of NaN are unchanged: they have no gradient.
        """
        is_row = jnp.isfinite(log_sum.logsumexp)
        finite = log_sum._replace(logsumexp=jnp.where(is_row, log_sum.logsumexp, 0))
        denominator = self.log_denominator_of(finite)
        ratio = sum(x - y for x, y in zip(finite, denominator, strict=True))
        factor = jnp.where(is_row, jnp.exp(ratio), 1)
        factor = jnp.moveaxis(factor, -1, -2)[..., None]
        values = (values * factor).astype(values.dtype)
        return values, jax.tree.map(
            lambda x, y: jnp.where(is_row, x, y), denominator, log_sum
        )

    def check(self, num_heads: int) -> None:
        """Raises ValueError if the normalizer does not fit attention of H heads."""

    def aligned(self, batch_ndim: int, num_heads: int) -> "Normalizer":
        """Shapes the normalizer's arrays as `[B..., H]`, B... of size 1, for maps."""
        del batch_ndim, num_heads
        return self


def as_normalizer(value: Normalizer | None) -> Normalizer | None:
    """Converts to a normalizer; None means softmax."""
    if value is None or isinstance(value, Normalizer):
        return value
    names = "sink", "unnormalized"
    suggestion = checks.nearest(value, names) if isinstance(value, str) else ""
    raise TypeError(
        f"normalizer must be None or a Normalizer, as {', '.join(names)} return; "
        f"got {checks.shown(value)}.{suggestion}"
    )


def sink(logits: Array | float) -> Normalizer:
    """Makes a softmax with an extra score per head in the denominator, of no key.

    The sink's share of a row goes to no value: values and weights are multiplied by
    `sigmoid(logsumexp - logit)`.

    Args:
      logits: `[H]`, or one number for all heads; 0 adds 1 to the denominator.

    Raises:
      ValueError: If `logits` are not floats `[H]` or one float.

    Source: Miller 2023, https://www.evanmiller.org/attention-is-off-by-one.html; its
    "zero sink": Xiao et al. 2023, https://arxiv.org/abs/2309.17453; learned per head:
    OpenAI 2025 (gpt-oss), https://arxiv.org/abs/2508.10925.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
      >>> normalizer = mh.attention.sink(0.0)
      >>> _, attention_map = mh.attend(query, key, value, normalizer=normalizer)
      >>> bool((attention_map.row_sums() < 1).all())  # the rest is the sink's
      True
    """
    logits = jnp.asarray(logits)
    if logits.ndim > 1 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits must be floats [H] or one float, got {logits.dtype} of shape "
            f"{logits.shape}."
        )
    return Sink(logits)


def unnormalized() -> Normalizer:
    """Omits normalization: weights are the exponentials of the scores.

    Use it with scores that are logs of positive kernels, as `scores.sigmoid` is;
    exponentials of plain dot products soon overflow.
    """
    return Unnormalized()


@tiles.pytree
class Sink(Normalizer):
    """Softmax with a sink; logits are `[]`, `[H]` or `[B..., H]`."""

    logits: Array

    @property
    def rows_sum_to(self) -> str:
        return "less than 1"

    def log_denominator(self, logsumexp: Array) -> Array:
        return self.log_denominator_of(LogSum.rounded(logsumexp)).logsumexp

    def log_denominator_of(self, log_sum: LogSum) -> LogSum:
        dtype, (*_, num_heads, _) = log_sum.logsumexp.dtype, log_sum.logsumexp.shape
        aligned = self.aligned(log_sum.logsumexp.ndim - 2, num_heads)
        return log_sum.plus(LogSum.rounded(aligned.logits.astype(dtype)[..., None]))

    def aligned(self, batch_ndim: int, num_heads: int) -> "Sink":
        if self.logits.ndim == batch_ndim + 1:
            return self
        logits = jnp.broadcast_to(self.logits, num_heads)
        return Sink(logits.reshape(*(1,) * batch_ndim, num_heads))

    def check(self, num_heads: int) -> None:
        if self.logits.shape[-1:] not in ((), (num_heads,)):
            raise ValueError(
                f"the sink's logits must be [H] = ({num_heads},) or one number, got "
                f"shape {self.logits.shape}."
            )


@tiles.pytree
class Unnormalized(Normalizer):
    """A denominator of 1."""

    @property
    def rows_sum_to(self) -> str:
        return "any amount"

    def log_denominator(self, logsumexp: Array) -> Array:
        return jnp.zeros_like(logsumexp)


@tiles.pytree
class Measured(Unnormalized):
    """A denominator of 1, of weights whose sums are known once they are computed."""

    are_shares: Bool[Array, "*B H"]

    @property
    def rows_sum_to(self) -> str:
        is_traced = isinstance(self.are_shares, core.Tracer)
        is_one = not is_traced and bool(self.are_shares.all())
        return "1" if is_one else super().rows_sum_to


def are_shares(weights: Float[Array, "*B H T S"]) -> Bool[Array, "*B H T"]:
    """Checks whether rows are positive and sum to 1, or are empty, or NaN."""
    sums, tolerance = weights.sum(-1), float(jnp.finfo(weights.dtype).eps) ** 0.5
    is_one = jnp.isclose(sums, 1, atol=tolerance) & (weights >= 0).all(-1)
    return is_one | (weights == 0).all(-1) | jnp.isnan(sums)
