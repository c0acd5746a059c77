"""The log of a sum of exponentials, accurate for scores of any size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
