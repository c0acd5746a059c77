"""Maps of long attention that another program computes, row by row.

Recognized attention has weights and masks that only its program knows. A map of it
holds what rows of weights are computed from, and the function that computes them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mha_haiku.core import masks, positions, tiles
from mha_haiku.core.attention import map_sites, normalizers, products
from mha_haiku.core.attention.attention_map import AttentionMap
from mha_haiku.core.attention.factors import Factors
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.observation import Observation, SideArrays, Sums
from mha_haiku.core.attention.tiled import fold, sweep

_NUMBERS = 2**22  # of a block of rows of all heads

# From leaves and positions `[R]` to the weights, and the scores if they are known,
# `[B..., H, R, S]`.
OfRows = Callable[[Any, Array], list[Array]]


def map_of_rows(
    leaves: Any,
    of_rows: OfRows,
    shape: tuple[int, ...],
    *,
    query: Float[Array, "*B T H K"] | None = None,
    key: Float[Array, "*B S G K"] | None = None,
    value: Float[Array, "*B S G V"] | None = None,
) -> AttentionMap:
    """Builds the map of weights that are computed row by row, as `map_of_recognized`.

    `shape` is `(B..., H, T, S)`. One pass over the rows finds rows of NaN, and queries
    and keys that are masked.
    """
    *batch, num_heads, num_queries, num_keys = shape
    rows = max(1, _NUMBERS // math.prod((*batch, num_heads, num_keys)))
    walk = RowFold(min(rows, num_queries))

    def block(seen: Array, positions: Array, _: Array) -> tuple[Array, tuple]:
        weights, *scores = weights_and_scores = of_rows(leaves, positions)
        _, mask = _weights_and_mask(weights_and_scores)
        of_rows_here = (
            jnp.isnan(weights).any(-1),
            mask.any(-1),
            normalizers.are_shares(weights),
            [-jnp.min(-x, -1) for x in scores],
        )
        return seen | mask.any(-2), of_rows_here

    begin = jnp.zeros((*batch, num_heads, num_keys), bool)
    axis = len(batch) + 1
    seen, (is_nan, sees, are_shares, largest) = tiles.over_rows(
        block, begin, num_queries, walk.rows, axis
    )
    dtype = jax.eval_shape(of_rows, leaves, jnp.arange(1))[0].dtype
    dtype = products.accumulation_dtype(dtype)
    log_sum = LogSum.rounded(jnp.where(sees | is_nan, 0, -jnp.inf).astype(dtype))
    if query is None or key is None:
        query = jnp.zeros((*batch, num_queries, num_heads, 1), dtype)
        key = jnp.zeros((*batch, num_keys, 1, 1), dtype)
    weighting = Weighting(
        RowMask(leaves, ~seen, of_rows),
        RowWeights(leaves, of_rows),
        _Score(0.0, None),
        normalizers.Measured(are_shares.all(-1)),
    )
    log_sum = log_sum.nan_where(is_nan)
    return AttentionMap(query, key, log_sum, weighting, value, walk, *largest)


def _weights_and_mask(weights_and_scores: list[Array]) -> tuple[Array, Array]:
    weights, *scores = weights_and_scores
    return weights, map_sites.seen_by(weights, scores[0] if scores else None)


class _Score(map_sites.Known):
    """The score of such a map: rows without weights have a logsumexp of -inf."""

    def sees(self, logsumexp: Array, weighting: Weighting) -> Array:
        del weighting
        return logsumexp != -jnp.inf


tiles.pytree(_Score)


@tiles.pytree
class RowWeights(positions.ScoreBias):
    """The weights of a map, row by row, as its bias."""

    leaves: Any
    of_rows: OfRows = tiles.static()

    def __repr__(self) -> str:
        return "computed row by row"

    def check(self, *sizes: Any) -> None:
        pass  # made for its map

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        weights, *_ = self.of_rows(self.leaves, tiles.as_array(rows))
        return tiles.take(weights, columns, -1)

    def at_head(self, example: tuple, head: int | Array) -> Self:
        del example, head
        raise ValueError(
            "what is computed row by row of a long recognized map has no gradient: "
            "differentiate a function of its weights(), or of a shorter text."
        )


@tiles.pytree
class RowMask(masks.Mask):
    """The mask of a map, row by row."""

    leaves: Any
    unseen: Bool[Array, "*B H S"]
    of_rows: OfRows = tiles.static()

    def __repr__(self) -> str:
        return "computed row by row"

    @property
    def block(self) -> int:
        return 32

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        weights_and_scores = self.of_rows(self.leaves, tiles.as_array(rows))
        return tiles.take(_weights_and_mask(weights_and_scores)[1], columns, -1)

    def has_heads(self) -> bool:
        return True

    def unseen_keys(
        self,
        num_queries: int,
        num_keys: int,
        first_query: int | Array = 0,
        first_key: int | Array = 0,
    ) -> Array | None:
        if num_keys == self.unseen.shape[-1]:
            return self.unseen
        return super().unseen_keys(num_queries, num_keys, first_query, first_key)


@dataclasses.dataclass(frozen=True)
class RowFold:
    """Folds maps that a program computes row by row; see `fold.forward`."""

    rows: int  # of a block

    def __repr__(self) -> str:
        return f"in blocks of {self.rows} rows"

    def of_part(self) -> Self:
        """Returns the walk over a rectangle of the map."""
        return self

    def __call__(
        self,
        observation: Observation,
        factors: Factors,
        arrays: SideArrays,
        sizes: sweep.Sizes,
    ) -> Sums:
        """Folds an observation over the rows of a map."""
        weights, origin = factors.weighting.bias, factors.weighting.origin
        assert isinstance(weights, RowWeights)
        *batch, num_heads, num_queries, num_keys = factors.shape
        columns, dtype = tiles.Span(0, num_keys) + origin.key, factors.logsumexp.dtype
        walk = RowFold(min(self.rows, num_queries))
        query = jnp.zeros((*batch, walk.rows, num_heads, 1), dtype)
        key = jnp.zeros((*batch, num_keys, 1, 1), dtype)

        def of_block(at: Array, is_new: Array) -> Sums:
            rows = at + origin.query
            here = weights.aligned_tile(rows, columns)
            seen = factors.weighting.mask.aligned_tile(rows, columns)
            seen = jnp.broadcast_to(tiles.lifted(seen, here.ndim), here.shape)
            log_sum = jax.tree.map(lambda x: jnp.take(x, at, -1), factors.log_sum)
            logsumexp = jnp.where(is_new, log_sum.logsumexp, -jnp.inf)
            part = Factors(
                query,
                key,
                Weighting(
                    masks.dense(seen),
                    positions.DenseBias(here.astype(dtype)),
                    _Score(0.0, None),
                ),
                log_sum._replace(logsumexp=logsumexp),
            )
            of_rows = functools.partial(jnp.take, indices=at, axis=len(batch))
            chunk = SideArrays(jax.tree.map(of_rows, arrays.queries), arrays.keys)
            return fold.forward(observation, part, chunk, sizes, tiles.Origin(at[0]))

        def block(total: tuple, at: Array, is_new: Array) -> tuple[tuple, Any]:
            sums = of_block(at, is_new)
            return jax.tree.map(jnp.add, total, (sums.keys, sums.head)), sums.queries

        at = jnp.arange(walk.rows)
        sums = jax.eval_shape(of_block, at, at >= 0)
        begin = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), (sums.keys, sums.head)
        )
        (keys, head), queries = tiles.over_rows(
            block, begin, num_queries, walk.rows, len(batch) + 1
        )
        return Sums(queries, keys, head)
