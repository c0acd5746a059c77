"""Adds up, over the keys of each row, what statistics of a head are made of.

T query positions, R of them in a block; S key positions, C of them in a tile; P bins of
queries and Q bins of keys in a pooled map.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku import tiles
from mha_haiku.attention import pooling, sweep, views

Array = jax.Array
SHARED = {}  # "sums": what `of_map` is where devices share the map; sharded/ registers
OFFSETS = (-1, 0, 1)  # of the key from the query: previous, same and next position

# Fields of a `Question` that are about positions: of queries, and of keys.
PER_QUERY = ("counted", "query_tokens")
PER_KEY = ("chosen", "key_tokens", "preceding_tokens")
PER_POSITION = (*PER_QUERY, *PER_KEY)

# Columns of what is linear in the weights; the bins of a pooled map come last.
_MASS, _FIRST_MOMENT, _SECOND_MOMENT, _FIRST_POSITION, _CHOSEN = range(5)


class Question(NamedTuple):
    """What is asked of a map.

    Attributes:
      query_offset: Query t stands at position t + `query_offset`.
      counted: `[B..., T]` booleans, the queries that count; None: all that see.
      chosen: `[B..., S]` booleans, positions of interest; None: none.
      query_tokens: `[B..., T]` integers, or None.
      key_tokens: `[B..., S]` integers, or None.
      preceding_tokens: `[B..., S]` integers, of the keys before the keys, or None.
      first_query: Where the first of the queries stands in the whole map.
      first_key: Where the first of the keys does.
    """

    query_offset: Array
    counted: Array | None
    chosen: Array | None
    query_tokens: Array | None
    key_tokens: Array | None
    preceding_tokens: Array | None
    first_query: Array
    first_key: Array

    def of_example(self, example: tuple) -> "Question":
        """Returns what is asked of one example's map."""
        of_one = {
            name: tiles.at_batch(array, example)
            for name, array in self._asdict().items()
            if name in PER_POSITION and array is not None
        }
        return self._replace(**of_one)


class RowSums(NamedTuple):
    """What adds up over the keys of a row; each `[R]` unless its shape is given."""

    entropy: Array
    squared_weights: Array
    largest: Array  # the largest log weight
    distance: Array
    squared_distance: Array
    at_offsets: Array  # [R, 3] log weights
    first_position: Array
    chosen_positions: Array | None
    same_token: Array | None
    induction: Array | None


class MapSums(NamedTuple):
    """What the rows of a map add up to.

    Attributes:
      rows: Over the keys of each row, `[B..., H, T]`.
      counts: `[B..., H, T]` booleans, the rows that count.
      received: `[B..., H, S]`, the mass that each key receives.
      mass: `[B..., H, P, Q]`, that of each cell of a grid, or None.
    """

    rows: RowSums
    counts: Array
    received: Array
    mass: Array | None


def of_map(
    attention_map: Any,
    question: Question,
    grid: pooling.Grid | None,
    sizes: sweep.Sizes,
) -> MapSums:
    """Returns the sums of a map, or of a part of one.

    Args:
      attention_map: The `AttentionMap`, or what has the same fields.
      question: What is asked.
      grid: The cells of the pooled map; None: no pooled map.
      sizes: Of the tiles.
    """
    *batch_shape, num_heads, num_queries = attention_map.logsumexp.shape
    sizes = sizes.fitted(num_queries, attention_map.key.shape[-3])

    def of_one(example, head):
        view = views.head_of(attention_map, example, head)
        return _of_head(view, question.of_example(example), grid, sizes)

    return sweep.over_heads(of_one, tuple(batch_shape), num_heads, sizes.heads)


def _of_head(view, question, grid, sizes) -> MapSums:
    num_queries, num_keys = len(view.query), len(view.key)
    dtype = view.logsumexp.dtype
    counts = view.logsumexp > -jnp.inf
    if question.counted is not None:
        counts &= question.counted
        view = view.without_rows(~counts)

    def of_rows(rows, fresh_from, carry):
        all_sums, received, pooled = carry
        fresh = tiles.take(counts, rows, 0) & (rows.array() >= fresh_from)
        fresh = fresh.astype(dtype)
        of_tile = _TileSums(view, fresh, question, grid, rows)
        mass = (
            None if grid is None else jnp.zeros((rows.size, grid.columns.count), dtype)
        )
        sums, received, mass = sweep.over_keys(
            of_tile,
            (nothing(rows.size, question, dtype), received, mass),
            view.mask,
            rows,
            num_keys,
            sizes.columns,
        )
        all_sums = jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, rows.start, 0),
            all_sums,
            sums,
        )
        if grid is not None:
            there = rows + question.first_query
            bins = grid.rows.membership(there, dtype) * fresh[:, None]
            pooled = grid.rows.add(pooled, bins.T @ mass, there, 0)
        return all_sums, received, pooled

    pooled = None
    if grid is not None:
        pooled = jnp.zeros((grid.rows.count, grid.columns.count), dtype)
    carry = (
        nothing(num_queries, question, dtype),
        jnp.zeros(num_keys, dtype),
        pooled,
    )
    sums, received, pooled = sweep.over_rows(of_rows, carry, num_queries, sizes.rows)
    return MapSums(sums, counts, received, pooled)


def nothing(shape: int | tuple[int, ...], question: Question, dtype) -> RowSums:
    """Returns the sums `[...]` of rows without keys."""
    zeros = jnp.zeros(shape, dtype)
    return RowSums(
        entropy=zeros,
        squared_weights=zeros,
        largest=zeros + views.HIDDEN,
        distance=zeros,
        squared_distance=zeros,
        at_offsets=jnp.full((*zeros.shape, len(OFFSETS)), views.HIDDEN, dtype),
        first_position=zeros,
        chosen_positions=None if question.chosen is None else zeros,
        same_token=None if question.key_tokens is None else zeros,
        induction=None if question.key_tokens is None else zeros,
    )


class _TileSums(NamedTuple):
    """Adds up what a tile of a block of rows contributes."""

    view: views.Head
    fresh: Array  # [R], 1 where a row counts and no block before had it
    question: Question
    grid: pooling.Grid | None
    rows: tiles.Span

    def __call__(self, columns, seen_from, carry):
        sums, received, mass = carry
        log_weights = self.view.log_weights(self.rows, columns, seen_from)
        # Not computed again for each of the sums, as XLA would on the CPU.
        weights = lax.optimization_barrier(jnp.exp(log_weights))
        question = self.question
        at_rows = self.rows.array() + question.first_query + question.query_offset
        there = columns + question.first_key
        linear = weights @ self._functionals(at_rows, columns, there)
        distance, squared_distance = self._moments(weights, linear, at_rows, there)
        chosen = sums.chosen_positions
        if chosen is not None:
            chosen = chosen + linear[:, _CHOSEN]
        sums = sums._replace(
            entropy=sums.entropy - (weights * log_weights).sum(-1),
            squared_weights=sums.squared_weights + (weights * weights).sum(-1),
            largest=jnp.maximum(sums.largest, log_weights.max(-1)),
            distance=sums.distance + distance,
            squared_distance=sums.squared_distance + squared_distance,
            at_offsets=jnp.maximum(
                sums.at_offsets, self._at_offsets(log_weights, at_rows, there)
            ),
            first_position=sums.first_position + linear[:, _FIRST_POSITION],
            chosen_positions=chosen,
            **self._tokens(sums, weights, at_rows, columns, there),
        )
        received = tiles.add(received, self.fresh @ weights, columns.start, 0)
        if self.grid is not None:
            of_bins = linear[:, -self.grid.columns.touched(columns.size) :]
            mass = self.grid.columns.add(mass, of_bins, there, 1)
        return sums, received, mass

    def _functionals(self, at_rows, columns, there):
        """Returns vectors `[C, n]` whose products with the weights are asked for.

        Those of the moments are the powers 0 to 2 of how far a key is from the edge of
        the tile that is nearest to the queries.
        """
        dtype = self.fresh.dtype
        at_columns = there.array()
        is_left = there.stop <= at_rows[0]
        inward = jnp.where(
            is_left, there.stop - 1 - at_columns, at_columns - there.start
        ).astype(dtype)
        parts = [jnp.ones_like(inward), inward, inward**2, at_columns == 0]
        if self.question.chosen is not None:
            parts.append(tiles.take(self.question.chosen, columns, 0))
        parts = [jnp.stack([part.astype(dtype) for part in parts], axis=1)]
        if self.grid is not None:
            parts.append(self.grid.columns.membership(there, dtype))
        return jnp.concatenate(parts, axis=1)

    def _moments(self, weights, linear, at_rows, columns):
        """Returns the sums of weight times |t - s| and (t - s)^2, `[R]` each."""
        at_columns = columns.array()

        def aside():
            mass = linear[:, _MASS]
            first, second = linear[:, _FIRST_MOMENT], linear[:, _SECOND_MOMENT]
            edge = jnp.where(
                columns.stop <= at_rows[0], columns.stop - 1, columns.start
            )
            outward = jnp.abs(at_rows - edge).astype(weights.dtype)
            return (
                outward * mass + first,
                outward * (outward * mass + 2 * first) + second,
            )

        def on_the_diagonal():
            distance = jnp.abs(at_rows[:, None] - at_columns[None, :])
            weighted = weights * distance.astype(weights.dtype)
            return weighted.sum(-1), (weighted * distance).sum(-1)

        is_aside = (columns.stop <= at_rows[0]) | (columns.start >= at_rows[-1])
        return lax.cond(is_aside, aside, on_the_diagonal)

    def _at_offsets(self, log_weights, at_rows, columns):
        """Returns the log weights of the keys at OFFSETS, `[R, 3]`, if in this tile."""
        wanted = at_rows[:, None] + jnp.asarray(OFFSETS)[None, :] - columns.start
        inside = (wanted >= 0) & (wanted < columns.size)
        found = jnp.take_along_axis(
            log_weights, jnp.clip(wanted, 0, columns.size - 1), axis=1
        )
        return jnp.where(inside, found, views.HIDDEN)

    def _tokens(self, sums, weights, at_rows, columns, there):
        """Returns the new sums that are about tokens."""
        question = self.question
        if question.key_tokens is None:
            return {}
        at_columns = there.array()[None, :]
        own = tiles.take(question.query_tokens, self.rows, 0)[:, None]
        tokens, before = (
            tiles.take(x, columns, 0)[None, :]
            for x in (question.key_tokens, question.preceding_tokens)
        )
        followed = (before == own) & (at_columns > 0) & (at_columns <= at_rows[:, None])
        return {
            "same_token": sums.same_token
            + jnp.where(tokens == own, weights, 0).sum(-1),
            "induction": sums.induction + jnp.where(followed, weights, 0).sum(-1),
        }
