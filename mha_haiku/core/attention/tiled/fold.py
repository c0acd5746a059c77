"""The one walk over the tiles of a map, which runs any observation of it.

The walk skips tiles that the mask rules out and holds no `[T, S]` array.
`fold_gradient` has the fold that can be differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.observation import Given, Observation, Sums, Tile, Tree
from mha_haiku.core.attention.tiled import sweep, views

Array = jax.Array


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    first: tiles.Origin | None = None,
) -> Sums:
    """Folds a map, or its part that begins at `first`; see `fold_gradient.fold`."""
    *batch_shape, num_heads, _ = maps[0].logsumexp.shape
    if observation.side_by_side:
        num_heads = 1

    def fold_head(example, head):
        walk = Walk.of(observation, maps, given, sizes, first, example, head)
        nothing = walk.nothing()
        totals = jax.tree.map(
            lambda x: jnp.zeros((len(walk.queries), *x.shape[1:]), x.dtype),
            nothing.queries,
        )

        def fold_block(block, sums):
            def add_tile(columns, seen_from, sums):
                tile = walk.tile(block, columns, seen_from)
                own = sums._replace(keys=take(sums.keys, columns))
                new = observation.add(tile, own)
                return new._replace(keys=put(sums.keys, new.keys, columns))

            sums_of_block = sums._replace(queries=nothing.queries)
            new = walk.over_keys(add_tile, block, sums_of_block)
            return new._replace(queries=block.put(sums.queries, new.queries))

        return walk.over_rows(fold_block, nothing._replace(queries=totals))

    sums = sweep.over_heads(fold_head, tuple(batch_shape), num_heads, sizes.heads)
    if observation.side_by_side:
        sums = jax.tree.map(lambda x: x.squeeze(len(batch_shape)), sums)
    return sums


class Block(NamedTuple):
    """A block of queries.

    All blocks have one size, so that the last one starts earlier where that size does
    not divide T: the queries that it shares with the block before are not new.
    """

    rows: tiles.Span  # which queries
    start: int  # the first query that the walk covers
    is_new: Array | None  # `[R]`, which queries are new; None: all
    # Per map `[R]`, or `[H, R]` side by side: the logsumexp, but very high where a
    # query is to have no weights.
    normalizers: tuple[Array, ...]

    @property
    def at(self) -> tiles.Span:
        """Where the block stands in sums of queries, which those walked over have."""
        return self.rows + (-self.start)

    def put(self, totals: Tree, new: Tree) -> Tree:
        if self.is_new is not None:
            old = take(totals, self.at)
            new = jax.tree.map(
                lambda x, y: jnp.where(
                    self.is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y
                ),
                new,
                old,
            )
        return put(totals, new, self.at)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The walk over one head, or over the heads of an example side by side."""

    observation: Observation
    # Of each map the head; side by side with an axis of heads in front.
    heads: tuple[views.Factors, ...]
    given: Given  # of the head
    sizes: sweep.Sizes
    first: tiles.Origin | None  # where in the whole map this part begins, or None
    queries: range  # the consecutive queries that it covers
    keys: range  # the consecutive keys
    # Whether all that stand side by side have one mask. A tile may be left out only
    # where all masks rule it out, which is not known otherwise.
    masks_agree: bool

    @classmethod
    def of(
        cls,
        observation: Observation,
        maps: tuple[views.Factors, ...],
        given: Given,
        sizes: sweep.Sizes,
        first: tiles.Origin | None,
        example: tuple,
        head: Array,
    ) -> "Walk":
        """Makes the walk over a head of an example; over all where side by side."""
        num_queries, num_keys = maps[0].query.shape[-3], maps[0].key.shape[-3]
        queries, keys = range(num_queries), range(num_keys)
        if first is None:
            queries, keys = observation.part(num_queries, num_keys)

        masks_agree = not observation.side_by_side or (
            len(maps) == 1 and not maps[0].weighting.mask.has_heads()
        )

        def head_of_map(factors):
            if not observation.side_by_side:
                return factors.head(example, head)
            heads = jnp.arange(factors.query.shape[-2])
            return jax.vmap(lambda i: factors.head(example, i))(heads)

        def given_of_head(x):
            x = tiles.at_batch(x, example)
            return x[:, 0] if x.shape[1] == 1 else x[:, head]

        return cls(
            observation,
            tuple(map(head_of_map, maps)),
            jax.tree.map(given_of_head, given),
            sizes.fitted(len(queries), num_keys),
            first,
            queries,
            keys,
            masks_agree,
        )

    def nothing(self) -> Sums:
        """Makes the initial sums of a block of queries, all keys and the head."""
        return self.observation.nothing(
            self.sizes.rows, self.num_keys, self.given, self.heads[0].logsumexp.dtype
        )

    @property
    def num_keys(self) -> int:
        return self.heads[0].key.shape[-2]

    def over_rows(self, function: Callable[[Block, Tree], Tree], carry: Tree) -> Tree:
        """Folds `function(block, carry)` over blocks of queries; returns `carry`."""
        if not self.num_keys:
            return carry
        start, size = self.queries.start, len(self.queries)

        def body(rows, fresh_from, carry):
            is_new = None
            if size % self.sizes.rows:
                is_new = rows.array() >= fresh_from
            rows += start  # from here on in the map; `fresh_from` was not
            normalizers = tuple(
                _normalizer(tiles.take(head.logsumexp, rows, -1), is_new)
                for head in self.heads
            )
            return function(Block(rows, start, is_new, normalizers), carry)

        return sweep.over_rows(body, carry, size, self.sizes.rows)

    def over_keys(
        self, function: Callable[[tiles.Span, Any, Tree], Tree], block: Block, carry
    ) -> Tree:
        """Calls `function(columns, seen_from, carry)` for the tiles of a block."""
        weighting = self.heads[0].weighting if self.masks_agree else None
        if self.observation.side_by_side:
            weighting = jax.tree.map(lambda x: x[0], weighting)
        return sweep.over_keys(
            function,
            carry,
            weighting,
            block.rows,
            self.num_keys,
            self.sizes.columns,
            (self.keys.start, self.keys.stop),
        )

    def log_weights(self, block: Block, columns: tiles.Span, seen_from: Any) -> tuple:
        def normalized(head, normalizer):
            scores = head.scores(block.rows, columns, seen_from)
            return scores - normalizer[:, None]

        if self.observation.side_by_side:
            normalized = jax.vmap(normalized)
        return tuple(map(normalized, self.heads, block.normalizers))

    def given_of(self, block: Block, columns: tiles.Span) -> Given:
        queries = take(self.given.queries, block.rows)
        return Given(queries, take(self.given.keys, columns))

    def tile(self, block: Block, columns: tiles.Span, seen_from: Any) -> Tile:
        log_weights = self.log_weights(block, columns, seen_from)
        return self.tile_of(log_weights, block, columns, self.given_of(block, columns))

    def tile_of(self, log_weights: tuple, block: Block, columns, given: Given) -> Tile:
        if not self.observation.side_by_side:
            (log_weights,) = log_weights
        rows = block.rows
        if self.first is not None:
            rows, columns = self.first.rows(rows), self.first.columns(columns)
        weights = jax.tree.map(jnp.exp, log_weights)
        return Tile(weights, log_weights, rows, columns, given)


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


def _normalizer(logsumexp: Array, is_new: Array | None) -> Array:
    # Weights are exp(score - normalizer): with 1e30 they are 0 even where the score is
    # HIDDEN, while log weights stay finite, as -inf - -inf would not.
    logsumexp = jnp.where(logsumexp == -jnp.inf, -HIDDEN, logsumexp)
    return logsumexp if is_new is None else jnp.where(is_new, logsumexp, -HIDDEN)
