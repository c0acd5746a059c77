"""What a map is made from, one head of it at a time, and the scores of its tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku.core import masks, tiles
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.weighting import Weighting

Array = jax.Array


class Factors(NamedTuple):
    """What a map is made from; or one head of it, whose arrays have no B... and H."""

    query: Array  # `[B..., T, H, K]`; of a head `[T, K]`
    key: Array  # `[B..., S, G, K]`; of a head `[S, K]`
    weighting: Weighting  # mask, bias, score and origin, aligned
    # `[B..., H, T]`, -inf where every key is masked; of a head `[T]`. None where it is
    # not known yet.
    logsumexp: Array | None = None

    def head(self, example: tuple, head: Array) -> "Factors":
        """Selects one head of one example; the indices may be traced."""
        whole, num_heads = self, self.query.shape[-2]
        if not num_heads:
            # A walk over no heads is traced all the same, to learn the shapes that it
            # returns, and no axis of size 0 can be indexed.
            def with_one_head(x):
                return jnp.zeros([size or 1 for size in x.shape], x.dtype)

            whole, num_heads = jax.tree.map(with_one_head, self), 1
        query, key, weighting, logsumexp = whole
        if logsumexp is not None:
            logsumexp = tiles.at_batch(logsumexp, (*example, head))
        return Factors(
            tiles.at_batch(query, example)[:, head],
            key_head(key, example, head, num_heads),
            weighting.at_head(example, head),
            logsumexp,
        )

    def scores(
        self, rows: tiles.Span, columns: tiles.Span, seen_from: Array | None
    ) -> Array:
        """Computes the scores `[R, C]` of a tile of a head, HIDDEN where masked.

        Keys before the position `seen_from` are hidden as well; None: the mask is known
        to allow all of the tile.
        """
        query, key = tiles.take(self.query, rows, 0), tiles.take(self.key, columns, 0)
        weighting = self.weighting
        if seen_from is None:
            weighting = weighting._replace(mask=masks.full())
        at = weighting.origin.at(rows, columns)
        tile = weighting.scores(query[:, None], key[:, None], *at, hidden=HIDDEN)[0]
        if seen_from is None or (isinstance(seen_from, int) and not seen_from):
            return tile
        return jnp.where(tiles.on_columns(columns) >= seen_from, tile, HIDDEN)


def counting(factors: Factors, counted: Array | None = None) -> tuple[Factors, Array]:
    """Builds a map of the rows that can be summed over, and marks rows that count.

    What is summed over queries would have NaN in other rows' places too, as 0 x NaN is
    NaN. So rows of NaN, and rows that do not count (`counted`, `[B..., T]`; None: all
    that see do), weigh nothing here, and whoever finishes the sums puts NaN where
    `[B..., H, T]`, what counts, is NaN: it is 1 for a row that counts, else 0.
    """
    logsumexp, is_nan = factors.logsumexp, jnp.isnan(factors.logsumexp)
    counts = jnp.where(is_nan, jnp.nan, logsumexp != -jnp.inf).astype(logsumexp.dtype)
    if counted is not None:
        counts = jnp.where(counted[..., None, :], counts, 0)
    has_weights = counts > 0
    query = factors.query
    if isinstance(
        factors.weighting.mask, masks.Full
    ):  # else zeros stand for NaN in it already
        query = jnp.where(jnp.moveaxis(has_weights, -1, -2)[..., None], query, 0)
    logsumexp = jnp.where(has_weights, logsumexp, -jnp.inf)
    return factors._replace(query=query, logsumexp=logsumexp), counts


def key_head(key: Array, example: tuple, head: Array, num_heads: int) -> Array:
    """Selects the `[S, K]` of `[B..., S, G, K]` that belong to a query head."""
    return tiles.at_batch(key, example)[:, head // (num_heads // key.shape[-2])]
