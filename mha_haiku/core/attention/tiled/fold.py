"""The walk over the tiles of a map that runs any observation of it.

The walk skips tiles that the mask rules out and holds no `[T, S]` array.
`fold_gradient` has the fold that can be differentiated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.log_sum import LogSum
from mha_haiku.core.attention.observation import Given, Observation, Sums, Tile, Tree
from mha_haiku.core.attention.tiled import sweep

Array = jax.Array


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    observation: Observation,
    factors: sweep.Factors,
    given: Given,
    sizes: sweep.Sizes,
    first: tiles.Origin | None = None,
) -> Sums:
    """Folds a map, or the part that begins at `first`; see `fold_gradient.fold`."""
    assert factors.log_sum is not None  # it is None inside attention only
    *batch_shape, num_heads, _ = factors.log_sum.logsumexp.shape

    def fold_head(example, head):
        walk = Walk(observation, factors, given, sizes, first, example, head)
        nothing = walk.nothing()
        totals = jax.tree.map(
            lambda x: jnp.zeros((walk.num_queries, *x.shape[1:]), x.dtype),
            nothing.queries,
        )

        def fold_block(block, sums):
            def add_tile(columns, seen_from, sums):
                tile = walk.tile(block, columns, seen_from)
                tile_sums = sums._replace(keys=take(sums.keys, columns))
                new = observation.add(tile, tile_sums)
                return new._replace(keys=put(sums.keys, new.keys, columns))

            sums_of_block = sums._replace(queries=nothing.queries)
            new = walk.over_keys(add_tile, block, sums_of_block)
            return new._replace(queries=block.put(sums.queries, new.queries))

        return walk.over_rows(fold_block, nothing._replace(queries=totals))

    return sweep.over_heads(fold_head, tuple(batch_shape), num_heads, sizes.heads)


class Block(NamedTuple):
    """A block of queries.

    All blocks have the same size. Where it does not divide T, the last block starts
    earlier: the queries that it shares with the block before are not new.
    """

    rows: tiles.Span  # the queries
    is_new: Array | None  # `[R]`, which queries are new; None if all are
    # `[R]`: the log sum, or inf to give a query weights of 0.
    log_sum: LogSum

    def put(self, totals: Tree, new: Tree) -> Tree:
        is_new = self.is_new
        if is_new is not None:
            old = take(totals, self.rows)
            new = jax.tree.map(
                lambda x, y: jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y),
                new,
                old,
            )
        return put(totals, new, self.rows)


class Walk:
    """The walk over one head of one example."""

    def __init__(
        self,
        observation: Observation,
        factors: sweep.Factors,
        given: Given,
        sizes: sweep.Sizes,
        first: tiles.Origin | None,  # where this part of the map begins, or None
        example: tuple,
        head: Array,
    ):
        def given_of_head(x):
            x = tiles.at_batch(x, example)
            return x[:, 0] if x.shape[1] == 1 else x[:, head]

        self.observation, self.first = observation, first
        self.num_queries, num_keys = factors.query.shape[-3], factors.key.shape[-3]
        self.sizes = sizes.fitted(self.num_queries, num_keys)
        self.head = factors.head(example, head)
        self.given = jax.tree.map(given_of_head, given)
        assert self.head.log_sum is not None  # see `forward`
        self.dtype = self.head.log_sum.logsumexp.dtype

    def nothing(self) -> Sums:
        """Makes the initial sums of a block of queries, all keys and the head."""
        return self.observation.nothing(
            self.sizes.rows, self.num_keys, self.given, self.dtype
        )

    @property
    def num_keys(self) -> int:
        return self.head.key.shape[0]

    def over_rows(self, function: Callable[[Block, Tree], Tree], carry: Tree) -> Tree:
        """Folds `function(block, carry)` over blocks of queries; returns `carry`."""
        if not self.num_keys:
            return carry

        def body(rows, fresh_from, carry):
            is_new = None
            if self.num_queries % self.sizes.rows:
                is_new = rows.array() >= fresh_from
            log_sum = take(self.head.log_sum, rows)
            # The exponential of any score less inf is 0.
            has_weights = log_sum.logsumexp != -jnp.inf
            if is_new is not None:
                has_weights &= is_new
            high = jnp.where(has_weights, log_sum.logsumexp, jnp.inf)
            log_sum = log_sum._replace(logsumexp=high)
            return function(Block(rows, is_new, log_sum), carry)

        return sweep.over_rows(body, carry, self.num_queries, self.sizes.rows)

    def over_keys(
        self,
        function: Callable[[tiles.Span, Any, Tree], Tree],
        block: Block,
        carry: Tree,
    ) -> Tree:
        """Calls `function(columns, seen_from, carry)` for the tiles of a block."""
        sizes = self.num_keys, self.sizes.columns
        weighting = self.head.weighting
        return sweep.over_keys(function, carry, weighting, block.rows, *sizes)

    def relative_scores(
        self, block: Block, columns: tiles.Span, seen_from: Any
    ) -> Array:
        scores = self.head.scores(block.rows, columns, seen_from)
        logsumexp, remainder = block.log_sum
        return (scores - logsumexp[:, None]) - remainder[:, None]

    def given_of(self, block: Block, columns: tiles.Span) -> Given:
        queries = take(self.given.queries, block.rows)
        return Given(queries, take(self.given.keys, columns))

    def tile(self, block: Block, columns: tiles.Span, seen_from: Any) -> Tile:
        relative = self.relative_scores(block, columns, seen_from)
        return self.tile_of(relative, block, columns, self.given_of(block, columns))

    def tile_of(
        self, relative: Array, block: Block, columns: tiles.Span, given: Given
    ) -> Tile:
        rows = block.rows
        if self.first is not None:
            rows, columns = self.first.rows(rows), self.first.columns(columns)
        score = self.head.weighting.score
        log_weights = jnp.maximum(score.log_weights(relative), HIDDEN)
        weights = score.weights(relative)
        return Tile(weights, log_weights, rows, columns, given, relative)


def take(tree: Tree, span: tiles.Span) -> Tree:
    """Takes a span of the first axis of each array."""
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, span.start, span.size, 0), tree
    )


def put(tree: Tree, new: Tree, span: tiles.Span) -> Tree:
    """Writes new values into a span of the first axis of each array."""
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, span.start, 0), tree, new
    )
