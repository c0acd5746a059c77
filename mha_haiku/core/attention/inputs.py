"""The arguments of attention, and how masks hide keys: -inf, HIDDEN and NaN.

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
from jaxtyping import Array, Bool, Float

from mha_haiku.core import masks, positions, tiles
from mha_haiku.core.attention import normalizers, scores
from mha_haiku.core.attention.normalizers import LogSum

HIDDEN = -1e30  # exp(HIDDEN) is 0, and 0 x HIDDEN is 0 and not NaN


class Weighting(NamedTuple):
    """How scores become weights: mask, bias, score, normalizer, and gates of values.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
      >>> _, attention_map = mh.attend(query, key, value, mask=mh.masks.causal())
      >>> attention_map.weighting.mask
      causal()
    """

    mask: masks.Mask = masks.full()  # which query may attend to which key
    # Added to the scores, or None; see `attend`.
    bias: positions.ScoreBias | None = None
    score: scores.Score = scores.dot_product()
    # The denominator of the weights. Defaults to softmax.
    normalizer: normalizers.Normalizer | None = None
    # Multiply the resulting values, or None.
    gates: Float[Array, "*B T H #V"] | None = None
    # The positions of the first query and the first key.
    origin: tiles.Origin = tiles.Origin()

    def aligned(
        self, query: Float[Array, "*B T H K"], num_keys: int, value_size: int
    ) -> "Weighting":
        """Aligns its parts with the batch axes; raises ValueError on a bad shape."""
        *batch_shape, num_queries, num_heads, key_size = query.shape
        batch_ndim, first_query = len(batch_shape), self.origin.query
        score = scores.as_score(self.score)
        score.check(num_heads, key_size)
        normalizer = normalizers.as_normalizer(self.normalizer)
        if normalizer is not None:
            normalizer.check(num_heads)
            normalizer = normalizer.aligned(batch_ndim, num_heads)
        bias = positions.as_bias(self.bias)
        if bias is not None:
            stop = None
            if isinstance(first_query, int):
                stop = first_query + num_queries
            bias.check(tuple(batch_shape), num_heads, stop, num_keys)
            bias = bias.aligned(batch_ndim)
        full = (*query.shape[:-1], value_size)
        possible = (full, (*full[:-1], 1))
        if self.gates is not None and self.gates.shape not in possible:
            raise ValueError(
                "gates must be [B..., T, H, 1] or [B..., T, H, V], of shape "
                f"{possible[1]} or {full}, got {self.gates.shape}."
            )
        return self._replace(
            mask=self.mask.aligned(batch_ndim),
            bias=bias,
            score=score.aligned(batch_ndim),
            normalizer=normalizer,
        )

    def scoring(self) -> "Weighting":
        """Drops the normalizer and gates, on which scores do not depend."""
        return self._replace(normalizer=None, gates=None)

    def moved(self, by: tiles.Origin) -> "Weighting":
        """Moves the origin to the part of the map that begins at `by`."""
        return self._replace(origin=self.origin.moved(by))

    def at_head(self, example: tuple, head: int | Array) -> "Weighting":
        """Selects what scores one head of one example: H = 1, no batch axes."""
        score = jax.tree.map(
            lambda x: tiles.at_batch(x, (*example, head))[None], self.score
        )
        bias = None if self.bias is None else self.bias.at_head(example, head)
        mask = self.mask.at_head(example, head)
        return Weighting(mask, bias, score, origin=self.origin)

    def scores(
        self,
        query: Float[Array, "*B R H K"],
        key: Float[Array, "*B C G K"],
        rows: tiles.Positions,
        columns: tiles.Positions,
    ) -> Float[Array, "*B H R C"]:
        """Computes scores at absolute positions, -inf where the mask forbids."""
        return self.masked(self.score(query, key), rows, columns)

    def masked(
        self,
        tile: Float[Array, "*B H R C"],
        rows: tiles.Positions,
        columns: tiles.Positions,
    ) -> Float[Array, "*B H R C"]:
        """Adds the bias to scores and sets them to -inf where the mask forbids."""
        if self.bias is not None:
            bias = tiles.lifted(self.bias.aligned_tile(rows, columns), tile.ndim)
            tile = tile + bias.astype(tile.dtype)
        if isinstance(self.mask, masks.Full):
            return tile
        allowed = self.mask.aligned_tile(rows, columns)
        return jnp.where(tiles.lifted(allowed, tile.ndim), tile, -jnp.inf)

    def finished(
        self, values: Float[Array, "*B T H V"], log_sum: LogSum
    ) -> tuple[Float[Array, "*B T H V"], LogSum]:
        """Applies the normalizer and the gates to the results of softmax attention."""
        if self.normalizer is not None:
            values, log_sum = self.normalizer(values, log_sum)
        return values if self.gates is None else values * self.gates, log_sum


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
