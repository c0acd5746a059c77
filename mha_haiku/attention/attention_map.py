"""The attention map, kept factored: any part of it is exact on demand.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads,
K size per head. From queries, keys and the logsumexp of each row of scores, which are
O(T + S) numbers, any weight is `p[t, s] = exp(score(q_t, k_s) - logsumexp[t])`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku import checks, masks, positions, tiles
from mha_haiku.attention import scores, sweep

Array = jax.Array


@tiles.pytree(data=("query", "key", "logsumexp", "mask", "bias", "score"))
class AttentionMap:
    """The weights `[B..., H, T, S]` of an attention, as a pytree of O(T + S) numbers.

    A row sums to 1, or to 0 where every key is masked. Weights are those before
    dropout. Maps pass through jit, vmap, pmap and scan; stacking maps adds batch axes.

    Attributes:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      logsumexp: `[B..., H, T]` in nats, -inf where every key is masked.
      mask: Which query may attend to which key.
      bias: What was added to the scores, or None.
      score: The score, with its parameters.
    """

    query: Array
    key: Array
    logsumexp: Array
    mask: masks.Mask
    bias: positions.ScoreBias | None
    score: scores.Score

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B..., H, T, S)`."""
        return (*self.logsumexp.shape, self.key.shape[-3])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.logsumexp.ndim + 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights: float32, or float64 for float64 queries."""
        return self.logsumexp.dtype

    def weights(self) -> Array:
        """Returns the whole map, `[B..., H, T, S]` in [0, 1]; O(T S) memory."""
        return self.tile(slice(None), slice(None))

    def tile(self, rows: tiles.Index, columns: tiles.Index) -> Array:
        """Returns the weights of some queries on some keys.

        Args:
          rows: R query positions: a slice, a range or an array of integers; negative
            ones count from the end where they are known.
          columns: C key positions, likewise.

        Returns:
          `[B..., H, R, C]`; O(R C) memory.

        Raises:
          ValueError: If a known position is outside of the map.
        """
        num_queries, num_keys = self.shape[-2:]
        rows = tiles.positions(rows, num_queries)
        columns = tiles.positions(columns, num_keys)
        tile = sweep.masked_scores(
            tiles.take(self.query, rows, axis=-3),
            tiles.take(self.key, columns, axis=-3),
            self.mask,
            self.bias,
            self.score,
            rows,
            columns,
        )
        logsumexp = tiles.take(self.logsumexp, rows, axis=-1)[..., None]
        # A row of NaN is blind until the end, as in the attention itself.
        faulty = jnp.isnan(logsumexp)
        blind = faulty | (logsumexp == -jnp.inf)
        tile = jnp.where(blind, -jnp.inf, tile) - jnp.where(blind, 0, logsumexp)
        return jnp.where(faulty, jnp.nan, jnp.exp(tile))

    def pooled(self, rows: int = 128, columns: int = 128) -> Array:
        """Returns the map at a coarse grain: the mass of each cell of a grid.

        Bins are `bin_edges(T, rows)` and `bin_edges(S, columns)`. One pass over the
        map, a bin of queries at a time; O(S T / rows) memory.

        Args:
          rows: The largest number of bins of queries.
          columns: The largest number of bins of keys.

        Returns:
          `[B..., H, R, C]`: the mean, over the queries of a bin that see anything, of
          their weight on the keys of a bin. A row sums to 1, or to 0 if no query sees.
        """
        num_queries, num_keys = self.shape[-2:]
        row_edges, column_edges = (
            bin_edges(num_queries, rows),
            bin_edges(num_keys, columns),
        )
        height, width = row_edges[1], column_edges[1]
        missing = (len(column_edges) - 1) * width - num_keys

        def pooled_row(start):
            index = start + jnp.arange(height)
            inside = jnp.minimum(index, num_queries - 1)
            sees = tiles.take(self.logsumexp, inside, axis=-1) > -jnp.inf
            counts = jnp.where(index < num_queries, 1, 0).reshape(
                (1,) * (sees.ndim - 1) + (-1,)
            )
            counts = (counts * sees).astype(self.dtype)[..., None]
            mass = (self.tile(inside, slice(None)) * counts).sum(-2)
            mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, missing)])
            mass = mass.reshape(*mass.shape[:-1], -1, width).sum(-1)
            return mass / jnp.maximum(counts.sum(-2), 1)

        return jnp.moveaxis(lax.map(pooled_row, row_edges[:-1]), 0, -2)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """Returns the whole map as a NumPy array."""
        del copy
        return np.asarray(self.weights(), dtype)

    def __jax_array__(self) -> Array:
        """Returns the whole map as a JAX array."""
        return self.weights()


def bin_edges(size: int, bins: int) -> np.ndarray:
    """Returns the edges of at most `bins` equal bins of positions; the last may differ.

    Args:
      size: The number of positions, at least 1.
      bins: The largest number of bins, at least 1.

    Returns:
      `[bins + 1]` integers from 0 to `size`; bin i covers `edges[i]:edges[i + 1]`.
    """
    checks.positive_integer("the number of positions", size)
    checks.positive_integer("the number of bins", bins)
    width = math.ceil(size / bins)
    return np.minimum(np.arange(math.ceil(size / width) + 1) * width, size)
