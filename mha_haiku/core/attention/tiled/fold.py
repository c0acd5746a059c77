"""The walk over the tiles of a map that runs any observation of it, and its gradient.

The walk skips tiles that the mask rules out and holds no `[T, S]` array. A second walk
differentiates it in reverse mode: what a tile adds to the sums is a function of its
relative scores and the `Given` arrays, which JAX differentiates. Sums add up over the
tiles, so every tile has the cotangents of the whole sums; scores are recomputed, as in
attention's gradient. As a relative score is a score less the logsumexp, the gradient
takes two paths: to queries, keys and bias here, and through the logsumexp into the
gradient of the attention that computed it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import gradients
from mha_haiku.core.attention.gradients import NO_GRADIENT
from mha_haiku.core.attention.inputs import HIDDEN, Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.observation import Given, Observation, Sums, Tile, Tree
from mha_haiku.core.attention.tiled import sweep

if TYPE_CHECKING:
    from mha_haiku.core.attention.attention_map import AttentionMap

# The log of a weight of 0, whose products with large cotangents must be finite.
_LOW = -1e4


def fold(
    observation: Observation, asked: "AttentionMap", given: Given, sizes: sweep.Sizes
) -> Sums:
    """Folds an observation over all tiles; differentiable in reverse mode."""

    def run(asked: "AttentionMap", given: Given) -> tuple[Sums, tuple]:
        # The gradient runs on whole arrays, even if they are sharded.
        walk = forward if asked.fold is None else asked.fold
        return walk(observation, sweep.Factors.of(asked), given, sizes), ()

    def pull_back(arguments: tuple, _: tuple, is_wanted: tuple, cotangents: Sums):
        asked, given = arguments
        return _pulled_back(observation, asked, given, cotangents, sizes, is_wanted)

    return gradients.with_gradient(run, pull_back)(asked, given)


def known(
    sums: Sums,
    observation: Observation,
    asked: "AttentionMap",
    given: Callable[["AttentionMap"], Given],
    sizes: sweep.Sizes,
) -> Sums:
    """Gives sums that are already known the gradient of an observation.

    The largest weights, for example, are differentiated as the weights at their keys.
    Only the gradient calls `given`.
    """

    def pull_back(arguments: tuple, _: tuple, is_wanted: tuple, cotangents: Sums):
        asked, given_arrays = arguments[0], given(arguments[0])
        is_wanted = is_wanted[0], jax.tree.map(lambda _: None, given_arrays)
        pulled = _pulled_back(
            observation, asked, given_arrays, cotangents, sizes, is_wanted
        )
        return pulled[0], None

    return gradients.with_gradient(lambda _, sums: (sums, ()), pull_back)(
        asked, lax.stop_gradient(sums)
    )


def _pulled_back(
    observation: Observation,
    asked: "AttentionMap",
    given: Given,
    cotangents: Sums,
    sizes: sweep.Sizes,
    is_wanted: tuple,
) -> tuple:
    if not jax.tree.leaves(cotangents):
        return None, None
    return backward(observation, sizes, asked, given, cotangents, is_wanted)


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    observation: Observation,
    factors: sweep.Factors,
    given: Given,
    sizes: sweep.Sizes,
    first: tiles.Origin | None = None,
) -> Sums:
    """Folds a map, or the part that begins at `first`; see `fold`."""
    assert factors.log_sum is not None  # it is None inside attention only
    *batch_shape, num_heads, _ = factors.log_sum.logsumexp.shape

    def fold_head(example: tuple, head: Array) -> Sums:
        walk = Walk(observation, factors, given, sizes, first, example, head)
        nothing = walk.nothing()
        totals = jax.tree.map(
            lambda x: jnp.zeros((walk.num_queries, *x.shape[1:]), x.dtype),
            nothing.queries,
        )

        def fold_block(block: Block, sums: Sums) -> Sums:
            def add_tile(columns: tiles.Span, seen_from: sweep.Start, sums: Sums):
                relative = walk.relative_scores(block, columns, seen_from)
                of_tile = walk.given_of(block, columns)
                tile = walk.tile_of(relative, block, columns, of_tile)
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
        def given_of_head(x: Array) -> Array:
            x = tiles.at_batch(x, example)
            return x[:, 0] if x.shape[1] == 1 else x[:, head]

        self.observation, self.first = observation, first
        self.num_queries, self.num_keys = (x.shape[-3] for x in factors[:2])
        self.sizes = sizes.fitted(self.num_queries, self.num_keys)
        self.head = factors.head(example, head)
        self.given = jax.tree.map(given_of_head, given)
        assert self.head.log_sum is not None  # see `forward`
        self.dtype = self.head.log_sum.logsumexp.dtype

    def nothing(self) -> Sums:
        """Makes the initial sums of a block of queries, all keys and the head."""
        return self.observation.nothing(
            self.sizes.rows, self.num_keys, self.given, self.dtype
        )

    def over_rows(self, function: Callable[[Block, Tree], Tree], carry: Tree) -> Tree:
        """Folds `function(block, carry)` over blocks of queries; returns `carry`."""
        if not self.num_keys:
            return carry

        def body(rows: tiles.Span, fresh_from: int | Array, carry: Tree) -> Tree:
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(
    observation: Observation,
    sizes: sweep.Sizes,
    asked: "AttentionMap",
    given: Given,
    cotangents: Sums,
    is_wanted: tuple["AttentionMap", Given],
) -> tuple["AttentionMap | None", Given]:
    """Computes the gradients of a map and of `given`, None where not wanted.

    `is_wanted` has None in the place of each array that is not differentiated.
    """
    wanted_map, wanted_given = is_wanted
    wants_map = bool(jax.tree.leaves(wanted_map))
    wants_bias = bool(jax.tree.leaves(wanted_map.weighting.bias))
    # A query without a finite logsumexp has weights of 0 here, so no gradient.
    logsumexp = jnp.where(jnp.isfinite(asked.logsumexp), asked.logsumexp, -jnp.inf)
    log_sum = asked.log_sum._replace(logsumexp=logsumexp)
    finite = sweep.Factors.of(asked)._replace(log_sum=log_sum)
    *batch_shape, num_heads, _ = logsumexp.shape

    def zeros_of(part: tuple, given: Given):
        """Makes the initial gradients of a map, or of a head."""
        given_zeros = jax.tree.map(jnp.zeros_like, _chosen(given, wanted_given))
        if not wants_map:
            return None, given_zeros
        query, key, weighting, (logsumexp, _) = part
        bias = weighting.bias if wants_bias else None
        query, key = (jnp.zeros_like(x, logsumexp.dtype) for x in (query, key))
        others = (
            Weighting(NO_GRADIENT, bias, weighting.score, origin=NO_GRADIENT),
            LogSum(logsumexp, NO_GRADIENT),
        )
        weighting, log_sum = jax.tree.map(jnp.zeros_like, others)
        return sweep.Factors(query, key, weighting, log_sum), given_zeros

    def head_gradients(example: tuple, head: Array, totals: tuple) -> tuple:
        del totals
        walk = Walk(observation, finite, given, sizes, None, example, head)
        of_head = jax.tree.map(
            lambda x: tiles.at_batch(x, (*example, head)), cotangents
        )

        def add_block(block: Block, totals: tuple) -> tuple:
            queries = take(of_head.queries, block.rows)

            def add_tile(columns: tiles.Span, seen_from: sweep.Start, totals: tuple):
                here = Sums(queries, take(of_head.keys, columns), of_head.head)
                return _add_tile(walk, totals, here, block, columns, seen_from)

            return walk.over_keys(add_tile, block, totals)

        # The gradients of keys are summed transposed, as `products.mix_transposed`
        # returns them.
        zeros, given_zeros = zeros_of(walk.head, walk.given)
        zeros = zeros and zeros._replace(key=zeros.key.T)
        map_grad, given_grad = walk.over_rows(add_block, (zeros, given_zeros))
        if map_grad is not None:
            weighting = jax.tree.map(lambda x: x.squeeze(0), map_grad.weighting)
            map_grad = map_grad._replace(key=map_grad.key.T, weighting=weighting)
        return by_head_axis(map_grad, given_grad)

    def by_head_axis(map_grad: sweep.Factors | None, given_grad: Given) -> tuple:
        return map_grad and map_grad[:2], map_grad and map_grad[2:], given_grad

    axes = (1, 0, 1)  # the axes of heads after B..., in the results
    totals = by_head_axis(*zeros_of(finite, given))
    vectors, others, given_grad = sweep.summed_over_heads(
        head_gradients, totals, axes, tuple(batch_shape), num_heads, sizes.heads
    )
    if not wants_map:
        return None, given_grad
    (query, key), (weighting, log_sum) = vectors, others
    query, key = query.astype(asked.query.dtype), key.astype(asked.key.dtype)
    map_grad = dataclasses.replace(
        asked, query=query, key=key, log_sum=log_sum, weighting=weighting
    )
    return map_grad, given_grad


def _add_tile(
    walk: Any,
    totals: tuple,
    cotangents: Sums,
    block: Block,
    columns: tiles.Span,
    seen_from: sweep.Start,
) -> tuple:
    """Adds a tile to the gradients of a head (the gradient of keys is `[K, S]`)."""
    map_grad, given_grad = totals
    observation, dtype = walk.observation, walk.dtype
    relative = walk.relative_scores(block, columns, seen_from)
    of_tile = walk.given_of(block, columns)
    is_hidden = relative < HIDDEN / 2

    def sums(relative: Array, wanted: Given) -> Sums:
        given = jax.tree.map(lambda x, new: x if new is None else new, of_tile, wanted)
        tile = walk.tile_of(relative, block, columns, given)
        # Inside the differentiated function, as `where` has no gradient for masked
        # pairs: numbers of 1e38 for a masked key would make it 0 x inf.
        tile = tile._replace(
            weights=jnp.where(is_hidden, 0, tile.weights),
            log_weights=jnp.where(is_hidden, _LOW, tile.log_weights),
        )
        nothing = observation.nothing(block.rows.size, columns.size, given, dtype)
        return _chosen(observation.add(tile, nothing), cotangents)

    _, pullback = jax.vjp(sums, relative, _chosen(of_tile, given_grad))
    scores_grad, tile_grad = pullback(cotangents)
    if map_grad is not None:
        weighting, grads = walk.head.weighting, map_grad.weighting
        query_grad, key_grad, score_grad = weighting.score.gradients(
            tiles.take(walk.head.query, block.rows, 0)[:, None],
            tiles.take(walk.head.key, columns, 0)[:, None],
            scores_grad[None],
        )
        grads = grads._replace(score=jax.tree.map(jnp.add, grads.score, score_grad))
        if grads.bias is not None:
            at = weighting.origin.at(block.rows, columns)
            bias = weighting.bias.add_gradient(grads.bias, scores_grad[None], *at)
            grads = grads._replace(bias=bias)
        start = block.rows.start
        map_grad = sweep.Factors(
            tiles.add(map_grad.query, query_grad[:, 0], start, 0),
            tiles.add(map_grad.key, key_grad[:, 0].T, columns.start, 1),
            grads,
            LogSum(
                tiles.add(map_grad.log_sum.logsumexp, -scores_grad.sum(-1), start, 0),
                NO_GRADIENT,
            ),
        )

    def added(totals: Tree, parts: Tree, span: tiles.Span) -> Tree:
        return jax.tree.map(
            lambda total, x: tiles.add(total, x, span.start, 0), totals, parts
        )

    return map_grad, Given(
        added(given_grad.queries, tile_grad.queries, block.rows),
        added(given_grad.keys, tile_grad.keys, columns),
    )


def _chosen(tree: Tree, like: Tree) -> Tree:
    """Replaces the leaves of a tree with None where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, like)
