"""One head at a time, and the scores and weights of rectangles of a map.

`B...` batch axes, R of T query positions, C of S key positions, H query heads, G key
heads (G divides H), K size per head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import masks, positions, tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.inputs import HIDDEN, Inputs

Array = jax.Array


class Factors(NamedTuple):
    """What a map is made from.

    Attributes:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      mask: Which query may attend to which key.
      bias: What is added to the scores, aligned, or None.
      score: The score, aligned.
      logsumexp: `[B..., H, T]`; -inf where every key is masked.
      origin: Where the first query and the first key stand.
    """

    query: Array
    key: Array
    mask: masks.Mask
    bias: positions.ScoreBias | None
    score: scores.Score
    logsumexp: Array
    origin: tiles.Origin = tiles.Origin()


@tiles.pytree(data=("query", "key", "mask", "bias", "score", "logsumexp", "origin"))
class Head:
    """The scores of one head of one example.

    Attributes:
      query: `[T, K]`.
      key: `[S, K]`.
      mask: Which query may attend to which key; without batch axes.
      bias: What is added to the scores, likewise, or None.
      score: The score, likewise.
      logsumexp: `[T]`, where it is known already; -inf for queries without weights.
      origin: Where the first query and the first key stand.
    """

    query: Array
    key: Array
    mask: masks.Mask
    bias: positions.ScoreBias | None
    score: scores.Score
    logsumexp: Array | None = None
    origin: tiles.Origin = tiles.Origin()

    def scores(
        self, rows: tiles.Span, columns: tiles.Span, seen_from: Array | None
    ) -> Array:
        """Returns the scores `[R, C]` of a tile, HIDDEN where the mask forbids.

        Args:
          rows: R queries.
          columns: C keys.
          seen_from: Keys before this position are hidden as well; None: the mask is
            known to allow all of the tile.
        """
        query, key = tiles.take(self.query, rows, 0), tiles.take(self.key, columns, 0)
        mask = masks.full() if seen_from is None else self.mask
        tile = masked_scores(
            query[:, None],
            key[:, None],
            mask,
            self.bias,
            self.score,
            self.origin.rows(rows),
            self.origin.columns(columns),
            hidden=HIDDEN,
        )[0]
        if seen_from is None or (isinstance(seen_from, int) and not seen_from):
            return tile
        # With -1 batch axes, that is without those and heads, positions are [1, C].
        return jnp.where(tiles.on_columns(columns, -1) >= seen_from, tile, HIDDEN)


def masked_scores(
    query: Array,
    key: Array,
    mask: masks.Mask,
    bias: positions.ScoreBias | None,
    score: scores.Score,
    rows: tiles.Index,
    columns: tiles.Index,
    *,
    hidden: float = -np.inf,
) -> Array:
    """Returns the scores of a tile, `hidden` where the mask forbids.

    Args:
      query: `[B..., R, H, K]`.
      key: `[B..., C, G, K]`.
      mask: Which pairs of positions may attend.
      bias: What is added to the scores, or None.
      score: The score.
      rows: `[R]` absolute positions of the queries.
      columns: `[C]`, of the keys.
      hidden: The score of what is masked.

    Returns:
      `[B..., H, R, C]`, float32 or float64.
    """
    batch_ndim = query.ndim - 3
    tile = score(query, key)
    if bias is not None:
        tile = tile + bias.aligned_tile(rows, columns, batch_ndim).astype(tile.dtype)
        if hidden > -np.inf:
            tile = jnp.maximum(tile, hidden)  # the bias may be minus infinity
    if isinstance(mask, masks.Full):
        return tile
    return jnp.where(mask.aligned_tile(rows, columns, batch_ndim), tile, hidden)


def scores_of(factors: Factors, rows: Array, columns: Array) -> Array:
    """Returns the scores of the queries at `rows` for the keys at `columns`.

    See `weights_of`; -inf where a key is masked.
    """
    return masked_scores(
        tiles.take(factors.query, rows, axis=-3),
        tiles.take(factors.key, columns, axis=-3),
        factors.mask,
        factors.bias,
        factors.score,
        factors.origin.rows(rows),
        factors.origin.columns(columns),
    )


def weights_of(factors: Factors, rows: Array, columns: Array) -> Array:
    """Returns the weights of the queries at `rows` on the keys at `columns`.

    Args:
      factors: Of the map.
      rows: `[R]` positions.
      columns: `[C]` positions.

    Returns:
      `[B..., H, R, C]`.
    """
    tile = scores_of(factors, rows, columns)
    logsumexp = tiles.take(factors.logsumexp, rows, axis=-1)[..., None]
    # A row of NaN is like a fully masked one until the end; see `inputs`.
    is_nan = jnp.isnan(logsumexp)
    has_none = is_nan | (logsumexp == -jnp.inf)
    tile = jnp.where(has_none, -jnp.inf, tile) - jnp.where(has_none, 0, logsumexp)
    return jnp.where(is_nan, jnp.nan, jnp.exp(tile))


def counting(factors: Factors, counted: Array | None = None) -> tuple[Factors, Array]:
    """Returns a map of the rows that can be summed over, and which of its rows count.

    What is summed over queries would have NaN in other rows' places too, as 0 x NaN is
    NaN. So rows of NaN weigh nothing here, and whoever finishes the sums puts NaN where
    such a row counts.

    Args:
      factors: Of the map.
      counted: `[B..., T]` booleans, the queries that count; None: all that see.

    Returns:
      Factors in which rows that do not count, and rows of NaN, have no weights; and
      `[B..., H, T]`: 1 for a row that counts, 0 for one that does not, NaN for one that
      counts and is NaN.
    """
    logsumexp, is_nan = factors.logsumexp, jnp.isnan(factors.logsumexp)
    counts = jnp.where(is_nan, jnp.nan, logsumexp != -jnp.inf).astype(logsumexp.dtype)
    if counted is not None:
        counts = jnp.where(counted[..., None, :], counts, 0)
    has_weights = counts > 0
    query = factors.query
    if isinstance(factors.mask, masks.Full):  # else zeros stand for NaN in it already
        query = jnp.where(jnp.moveaxis(has_weights, -1, -2)[..., None], query, 0)
    logsumexp = jnp.where(has_weights, logsumexp, -jnp.inf)
    return factors._replace(query=query, logsumexp=logsumexp), counts


def head_of(inputs: Inputs | Factors, example: tuple, head: Array) -> Head:
    """Returns one head of one example.

    Args:
      inputs: What attention is computed from; or a map, whose logsumexp is known.
      example: An index per batch axis; may be traced.
      head: The index of the head, likewise.
    """
    num_heads = inputs.query.shape[-2]
    logsumexp = getattr(inputs, "logsumexp", None)
    if not num_heads:
        # A walk over no heads is traced all the same, to learn the shapes that it
        # returns, and no axis of size 0 can be indexed.
        inputs = jax.tree.map(_with_one_head, inputs)
        logsumexp, num_heads = inputs.logsumexp, 1
    return Head(
        tiles.at_batch(inputs.query, example)[:, head],
        key_head(inputs.key, example, head, num_heads),
        inputs.mask.at_head(example, head),
        *(
            jax.tree.map(lambda x: tiles.at_batch(x, (*example, head))[None], tree)
            for tree in (inputs.bias, inputs.score)
        ),
        None if logsumexp is None else tiles.at_batch(logsumexp, (*example, head)),
        inputs.origin,
    )


def _with_one_head(array: Array) -> Array:
    return jnp.zeros([size or 1 for size in array.shape], array.dtype)


def key_head(key: Array, example: tuple, head: Array, num_heads: int) -> Array:
    """Returns the `[S, K]` of `[B..., S, G, K]` that belong to a query head."""
    return tiles.at_batch(key, example)[:, head // (num_heads // key.shape[-2])]
