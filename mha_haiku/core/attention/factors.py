"""The arrays that define an attention map, from which any tile of it is computed.

`AttentionMap` is these arrays for its users; the tile engine takes them as `Factors`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mha_haiku.core import masks, tiles
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum

# The first key of a tile that is seen; see `Factors.scores`.
Start = int | Array | None


@tiles.pytree
class Factors:
    """The arrays that define a map; or one head of it, without axes B... and H."""

    query: Array  # `[B..., T, H, K]`; of a head `[T, K]`
    key: Array  # `[B..., S, G, K]`; of a head `[S, K]`
    weighting: Weighting  # mask, bias, score and origin, aligned
    # `[B..., H, T]`, -inf where every key is masked; of a head `[T]`. None inside
    # attention, which computes it.
    log_sum: LogSum | None = None
    # The walk over the tiles of a map that devices share, in place of `tiled.fold`.
    fold: Any = tiles.static(default=None)

    @property
    def logsumexp(self) -> Float[Array, "*B H T"]:
        assert self.log_sum is not None  # only attention has none
        return self.log_sum.logsumexp

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B..., H, T, S)`."""
        return (*self.logsumexp.shape, self.key.shape[-3])

    def weights_at(
        self, rows: Array | np.ndarray, columns: Array | np.ndarray
    ) -> Float[Array, "*B H R C"]:
        """Computes the weights of R queries on C keys, given as positions."""
        assert self.log_sum is not None
        tile = self.scores_at(rows, columns)
        logsumexp, remainder = (
            tiles.take(x, rows, axis=-1)[..., None] for x in self.log_sum
        )
        # A row of NaN is treated like a fully masked one until the end; see `inputs`.
        is_nan = jnp.isnan(logsumexp)
        has_none = is_nan | (logsumexp == -jnp.inf)
        tile = jnp.where(has_none, -jnp.inf, tile) - jnp.where(has_none, 0, logsumexp)
        weights = self.weighting.score.weights(tile - remainder)
        return jnp.where(is_nan, jnp.nan, weights)

    def scores_at(
        self, rows: Array | np.ndarray, columns: Array | np.ndarray
    ) -> Float[Array, "*B H R C"]:
        """Computes the scores of R queries and C keys, -inf where masked."""
        return self.weighting.scores(
            tiles.take(self.query, rows, axis=-3),
            tiles.take(self.key, columns, axis=-3),
            *self.weighting.origin.at(rows, columns),
        )

    def head(self, example: tuple, head: Array) -> "Factors":
        """Selects one head of one example; the indices may be traced."""
        whole, num_heads = self, self.query.shape[-2]
        if not num_heads:
            # A walk over no heads is traced all the same, for the shapes that it
            # returns, and an axis of size 0 cannot be indexed.
            def with_one_head(x: Array) -> Array:
                return jnp.zeros([size or 1 for size in x.shape], x.dtype)

            whole, num_heads = jax.tree.map(with_one_head, self), 1
        log_sum = jax.tree.map(
            lambda x: tiles.at_batch(x, (*example, head)), whole.log_sum
        )
        return Factors(
            tiles.at_batch(whole.query, example)[:, head],
            key_head(whole.key, example, head, num_heads),
            whole.weighting.at_head(example, head),
            log_sum,
        )

    def scores(self, rows: tiles.Span, columns: tiles.Span, seen_from: Start) -> Array:
        """Computes the scores `[R, C]` of a tile of a head, -inf where masked.

        Keys before the position `seen_from` are hidden as well. None means that the
        mask is known to allow the whole tile.
        """
        query, key = tiles.take(self.query, rows, 0), tiles.take(self.key, columns, 0)
        weighting = self.weighting
        if seen_from is None:
            weighting = weighting._replace(mask=masks.full())
        at = weighting.origin.at(rows, columns)
        tile = weighting.scores(query[:, None], key[:, None], *at)[0]
        if seen_from is None or (isinstance(seen_from, int) and not seen_from):
            return tile
        return jnp.where(tiles.on_columns(columns) >= seen_from, tile, -jnp.inf)

    def with_log_sum(self, logsumexp: Array) -> "Factors":
        """Replaces the rounded logsumexp of each row."""
        assert self.log_sum is not None
        log_sum = self.log_sum._replace(logsumexp=logsumexp)
        return dataclasses.replace(self, log_sum=log_sum)


def key_head(key: Array, example: tuple, head: Array, num_heads: int) -> Array:
    """Selects the `[S, K]` of `[B..., S, G, K]` that belong to a query head."""
    return tiles.at_batch(key, example)[:, head // (num_heads // key.shape[-2])]
