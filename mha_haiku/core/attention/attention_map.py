"""The attention map in factored form; any part of it is computed exactly on demand.

From queries, keys and the logsumexp of each row of scores, which are O(T + S) numbers,
any weight is `p[t, s] = exp(score(q_t, k_s) - logsumexp[t])`; the rounding error of the
logsumexp is kept with it, so that weights are accurate for scores of any size. With a
normalizer other than softmax, its log denominator replaces the logsumexp.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from mha_haiku.core import checks, display, tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.factors import Factors
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.observation import (
    NO_ARRAYS,
    Observation,
    SideArrays,
    Sums,
    Top,
)
from mha_haiku.core.attention.statistics import Statistics
from mha_haiku.core.attention.tiled import divergences, engine


@tiles.pytree
class AttentionMap:
    """The weights `[B..., H, T, S]` of an attention, as a pytree of O(T + S) numbers.

    A row sums to 1, or to 0 where every key is masked; with a normalizer other than
    softmax it sums to what `row_sums()` returns. Weights are taken before dropout.
    Calling `attend` on the arrays of a map reproduces its values. Maps pass through
    jit, vmap, pmap and scan; stacking maps adds batch axes (where `first_query` was an
    integer).

    Attributes:
      query: The queries as the score gets them: normalized and rotated.
      key: The keys, in the same form.
      log_sum: The log denominator of the weights, in nats, and its rounding error; see
        `logsumexp`.
      weighting: Mask, bias, score, normalizer, gates and origin, aligned.
      value: The values that the weights average, or None if they are not known.
      fold: The walk over the tiles of a map that is sharded over devices, in place of
        `tiled.fold`; None if one device holds the whole map.
      largest_scores: The largest score that each query sees, of a map of known weights;
        None if these are computed from scores, or their scores are not known.

    Example:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
      >>> _, attention_map = mh.attend(query, key, value)
      >>> attention_map.weights().sum(-1).round(4).min()
      Array(1., dtype=float32)
      >>> attention_map.statistics().entropy.shape  # nats, of each example and head
      (2, 4)
    """

    query: Float[Array, "*B T H K"]
    key: Float[Array, "*B S G K"]
    log_sum: LogSum
    weighting: Weighting
    value: Float[Array, "*B S G V"] | None = None
    fold: Callable[..., Sums] | None = tiles.static(default=None)
    largest_scores: Float[Array, "*B H T"] | None = None

    def __repr__(self) -> str:
        try:
            weights = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        except (AttributeError, IndexError, TypeError):  # in_axes or specs, no arrays
            return display.record(self)
        mask, bias, score, *_, origin = self.weighting
        parts = [f"{weights} [B..., H, T, S] in [0, 1]", f"mask {mask}"]
        if self.rows_sum_to != "1":
            parts[0] = f"{weights} [B..., H, T, S], rows sum to {self.rows_sum_to}"
        query, key = map(display.value, (self.query, self.key))
        parts.append(score.map_of or f"query {query}, key {key}")
        if bias is not None and not score.map_of:
            parts.append(f"bias {bias}")
        if not score.map_of and repr(score) != repr(scores.dot_product()):
            parts.append(f"score {score}")
        if not isinstance(origin.query, int) or origin.query:
            parts.append(f"first_query {display.numbers(origin.query)}")
        if self.fold is not None:
            parts.append(repr(self.fold))
        return f"AttentionMap({', '.join(parts)})"

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def logsumexp(self) -> Float[Array, "*B H T"]:
        """The log denominator of the weights, in nats; -inf where fully masked."""
        return self.log_sum.logsumexp

    @property
    def sees(self) -> Bool[Array, "*B H T"]:
        """Marks the queries that see any key, even one that is NaN."""
        return self.weighting.score.sees(self.logsumexp, self.weighting)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B..., H, T, S)`."""
        return (*self.logsumexp.shape, self.key.shape[-3])

    @property
    def rows_sum_to(self) -> str:
        """The sum of the weights of a row, in words."""
        normalizer = self.weighting.normalizer
        return "1" if normalizer is None else normalizer.rows_sum_to

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.logsumexp.ndim + 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights: float32, or float64 for float64 queries."""
        return self.logsumexp.dtype

    def weights(self) -> Float[Array, "*B H T S"]:
        """Computes the whole map; O(T S) memory."""
        return self.tile(slice(None), slice(None))

    def scores(self) -> Float[Array, "*B H T S"]:
        """Computes the scores, with bias, -inf where masked; O(T S) memory."""
        num_queries, num_keys = self.shape[-2:]
        scores = self._factors().scores_at(np.arange(num_queries), np.arange(num_keys))
        return self.weighting.score.log_weights(scores)

    def tile(self, rows: tiles.Index, columns: tiles.Index) -> Float[Array, "*B H R C"]:
        """Computes the weights of some queries on some keys; O(R C) memory.

        Rows and columns are R and C positions: a slice, a range or an array of
        integers. Negative integers count from the end, unless they are traced.
        """
        num_queries, num_keys = self.shape[-2:]
        rows = tiles.positions(rows, num_queries)
        columns = tiles.positions(columns, num_keys)
        return self._factors().weights_at(rows, columns)

    def row_sums(self) -> Float[Array, "*B H T"]:
        """Returns the sum of each query's weights: 1, or 0 if it is fully masked.

        With a sink, the rest up to 1 is the sink's share.
        """
        ones = jnp.ones((*self.shape[:-3], self.shape[-1], 1, 1), self.dtype)
        return jnp.moveaxis(self.apply(ones)[..., 0], -1, -2)

    def statistics(
        self,
        *,
        pooled: tuple[int, int] | None = None,
        counted: Array | np.ndarray | None = None,
        positions: Array | np.ndarray | None = None,
        tokens: Array | np.ndarray | None = None,
        key_tokens: Array | np.ndarray | None = None,
        per_query: bool = False,
    ) -> Statistics:
        """Computes the statistics of each head, in one pass over the tiles.

        Queries that see nothing (padding) do not count. A counted query that sees NaN
        makes its head NaN. Weights are not renormalized: where rows sum to less than 1,
        so do shares of attention, and entropy is `-sum w log w` of these weights.

        Args:
          pooled: (P, Q), to also pool the map to this number of bins, in the same pass.
          counted: `[B..., T]` booleans: the queries that count. Defaults to all that
            see a key.
          positions: `[B..., S]` booleans: positions (separators, say) whose mass to
            measure.
          tokens: `[B..., T]` integers, the tokens of the queries, for the mass on equal
            tokens and the induction score.
          key_tokens: `[B..., S]`, the tokens of the keys. Defaults to `tokens`.
          per_query: Return a number per query, `[B..., H, T]`, instead of the average.

        Raises:
          ValueError: If an array does not fit the map, or a number of bins is below 1.
        """
        return engine.statistics(
            self._factors(),
            pooled=pooled,
            per_query=per_query,
            counted=counted,
            positions=positions,
            tokens=tokens,
            key_tokens=key_tokens,
            largest_scores=self.largest_scores,
        )

    def pooled(
        self,
        rows: int = 128,
        columns: int = 128,
        *,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> Float[Array, "*B H P Q"]:
        """Pools the map into `bin_edges(T, rows)` x `bin_edges(S, columns)` cells.

        Args:
          rows: The largest number of bins of queries.
          columns: The largest number of bins of keys.
          queries: The consecutive queries to pool, as when a viewer zooms in.
          keys: The consecutive keys to pool.

        Returns:
          The mean, over the queries of a bin that see any key, of their weight on the
          keys of a bin. With all keys a row has the same sum as a row of the map, or 0
          if no query sees a key.

        Raises:
          ValueError: If a number of bins is below 1, or positions are not
            consecutive.
        """
        return engine.pooled(self._factors(), rows, columns, queries, keys)

    def top(self, k: int) -> Top:
        """Finds the k largest weights of each row, and their keys.

        Raises:
          ValueError: If `k` is not in 1..S.
        """
        checks.integer_in("k", k, 1, self.shape[-1])
        return engine.top(self._factors(), k)

    def apply(self, x: Shaped[Array, "*B S #H V"]) -> Float[Array, "*B T H V"]:
        """Multiplies the map by `x`: the weighted sum over keys for each query.

        Of grouped heads, `x` may have one for each group, as values have.
        """
        num_heads, groups = self.shape[-3], self.key.shape[-2]
        if 1 < x.shape[-2] == groups < num_heads:
            x = x.repeat(num_heads // groups, axis=-2)
        return engine.apply(self._factors(), x)

    def outputs(self) -> Float[Array, "*B T H V"]:
        """Computes each head's output: its weights times its values, gated.

        Raises:
          ValueError: If the map has no value.
        """
        value, (*batch, num_heads, length, _) = self.value, self.shape
        if value is None:
            raise ValueError("the map has no values, which the outputs of heads need.")
        if not num_heads:
            return jnp.zeros((*batch, length, 0, value.shape[-1]), value.dtype)
        value = value.repeat(num_heads // value.shape[-2], axis=-2)
        outputs = self.apply(value).astype(value.dtype)
        gates = self.weighting.gates
        return outputs if gates is None else outputs * gates

    def apply_transposed(
        self, y: Shaped[Array, "*B T #H V"]
    ) -> Float[Array, "*B S H V"]:
        """Multiplies the transposed map by `y`: for each key the sum over queries."""
        return engine.apply_transposed(self._factors(), y)

    def divergence(
        self, other: "AttentionMap | None" = None
    ) -> Float[Array, "*B H H2"]:
        """Computes the Jensen-Shannon divergences between heads.

        In nats, from 0 (identical) to log 2; the mean over queries that see a key in
        both maps. Without `other`, the heads of this map are compared with each other.

        Raises:
          ValueError: If the maps disagree on batch axes, T or S.

        Source: Clark et al. 2019, section 6, https://arxiv.org/abs/1906.04341.
        """
        factors = None if other is None else other._factors()
        return divergences.divergence(self._factors(), factors)

    def observe(
        self,
        observation: Observation,
        arrays: SideArrays = NO_ARRAYS,
    ) -> Sums:
        """Runs an observation over the tiles; sums get leading axes `[B..., H]`."""
        return engine.observe(self._factors(), observation=observation, arrays=arrays)

    def _factors(self) -> Factors:
        """Returns the arrays that define the map, for the tile engine."""
        self.checked_origin()
        scoring = self.weighting.scoring()
        return Factors(self.query, self.key, scoring, self.log_sum, self.fold)

    def checked_origin(self) -> tiles.Origin:
        """Returns the origin; raises ValueError where stacked maps have several."""
        origin = self.weighting.origin
        if jnp.ndim(origin.query):
            raise ValueError(
                "an attention map has one first_query, got an array of shape "
                f"{jnp.shape(origin.query)}: maps were stacked whose first_query "
                "was an array. Use the maps under jax.vmap, or stack maps whose "
                "first_query is one integer."
            )
        return origin

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.weights(), dtype)

    def __jax_array__(self) -> Array:
        return self.weights()
