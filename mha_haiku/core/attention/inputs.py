"""The inputs of attention, and how masks hide keys: -inf, HIDDEN and NaN.

Three special numbers have three purposes:

- `-inf` is the score of a masked pair, and the logsumexp of a fully masked query (one
  that may attend to no key, as padding may not). Any finite score, down to the lowest
  float, is the score of a visible key. So the running maximum of a tile starts at the
  lowest float and not at -inf: exp(-inf - -inf) would be NaN, while exp(-inf - lowest)
  is 0. A fully masked query is one whose exponentials sum to 0.
- `HIDDEN`, very low but finite, is the log of a weight of 0 in the tiles passed to
  observations: `weight * log(weight)` is 0 there, where -inf would make it NaN.
- `NaN` marks results of an input that was not finite. A matrix product would spread a
  masked NaN, as 0 x NaN is NaN, forward and backward. So products get finite arrays, in
  which `Nonfinite` vectors are zeros, and NaN is put back only into scores that the
  mask allows: it reaches only the queries that may attend to such a vector, in their
  values and their logsumexp. Everything after that depends on the logsumexp: where it
  is NaN, weights are NaN, and there is no gradient (inf in its place makes all weights
  0). A masked number that is finite but overflows in a product stays in the arrays:
  gradients of scores are set to 0 where weights are 0, as 0 x inf is NaN too. NaN from
  another source, a bias or a product that overflows, is not removed from scores that
  the mask allows, and may spread to gradients.

Without a mask (`masks.Full`) none of this is done: NaN spreads by itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from mha_haiku.core import tiles
from mha_haiku.core.attention.weighting import Weighting

Array = jax.Array
HIDDEN = -1e30  # exp(HIDDEN) is 0, and 0 x HIDDEN is 0 and not NaN


class Nonfinite(NamedTuple):
    """Marks queries that are not finite, and keys that, or whose values, are not."""

    queries: Bool[Array, "*B T H"]
    keys: Bool[Array, "*B S G"]

    @classmethod
    def of(
        cls,
        query: Float[Array, "*B T H K"],
        key: Float[Array, "*B S G K"],
        value: Float[Array, "*B S G V"],
    ) -> "Nonfinite":
        query, key, value = (~jnp.isfinite(x).all(-1) for x in (query, key, value))
        return cls(query, key | value)

    def pairs(
        self, rows: tiles.Positions, columns: tiles.Positions
    ) -> Bool[Array, "*B H R C"]:
        """Finds which pairs of R queries and C keys have a nonfinite vector."""
        queries = tiles.take(self.queries, rows, axis=-2)
        keys = tiles.take(self.keys, columns, axis=-2)
        keys = jnp.repeat(keys, queries.shape[-1] // keys.shape[-1], axis=-1)
        queries = jnp.moveaxis(queries, -1, -2)[..., :, None]
        return queries | jnp.moveaxis(keys, -1, -2)[..., None, :]


class Inputs(NamedTuple):
    """The inputs of attention."""

    query: Float[Array, "*B T H K"]
    key: Float[Array, "*B S G K"]
    value: Float[Array, "*B S G V"]
    # Mask, bias and score, aligned; implementations support only softmax.
    weighting: Weighting
    # Which vectors are not finite; None without a mask, where it is not needed.
    nonfinite: Nonfinite | None = None
    rng: Array | None = None  # the random key of dropout, or None without dropout

    def zeroed(self) -> "Inputs":
        """Replaces nonfinite queries, keys and values by zeros."""
        if self.nonfinite is None:
            return self
        queries, keys = (x[..., None] for x in self.nonfinite)
        key, value = (jnp.where(keys, 0, x) for x in (self.key, self.value))
        query = jnp.where(queries, 0, self.query)
        return self._replace(query=query, key=key, value=value)

    @property
    def map_shape(self) -> tuple[int, ...]:
        """`(B..., H, T, S)`."""
        *batch_shape, num_queries, num_heads, _ = self.query.shape
        return (*batch_shape, num_heads, num_queries, self.key.shape[-3])
