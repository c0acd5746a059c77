"""The walk over the tiles of a map that runs any observation of it, and its gradient.

The walk skips tiles that the mask rules out and holds no `[T, S]` array. A second walk
differentiates it in reverse mode: what a tile adds to the sums is a function of its
relative scores and the `SideArrays`, which JAX differentiates. Sums add up over the
tiles, so every tile has the cotangents of the whole sums; scores are recomputed, as in
attention's gradient. As a relative score is a score less the logsumexp, the gradient
takes two paths: to queries, keys and bias here, and through the logsumexp into the
gradient of the attention that computed it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import gradients
from mha_haiku.core.attention.factors import Factors, Start
from mha_haiku.core.attention.gradients import NO_GRADIENT
from mha_haiku.core.attention.inputs import HIDDEN, Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.observation import (
    Observation,
    SideArrays,
    Sums,
    Tile,
    Tree,
)
from mha_haiku.core.attention.tiled import sweep

# The log of a weight of 0, whose products with large cotangents must be finite.
_LOW = -1e4


def fold(
    observation: Observation, factors: Factors, arrays: SideArrays, sizes: sweep.Sizes
) -> Sums:
    """Folds an observation over all tiles; differentiable in reverse mode."""

    def run(factors: Factors, arrays: SideArrays) -> tuple[Sums, tuple]:
        # The gradient runs on whole arrays, even if they are sharded.
        walk = forward if factors.fold is None else factors.fold
        factors = dataclasses.replace(factors, fold=None)
        return walk(observation, factors, arrays, sizes), ()

    def pull_back(arguments: tuple, _: tuple, is_wanted: tuple, cotangents: Sums):
        factors, arrays = arguments
        return _pulled_back(observation, sizes, factors, arrays, cotangents, is_wanted)

    return gradients.with_gradient(run, pull_back)(factors, arrays)


def with_gradient(
    sums: Sums,
    observation: Observation,
    factors: Factors,
    arrays_of: Callable[[Factors], SideArrays],
    sizes: sweep.Sizes,
) -> Sums:
    """Gives sums that were computed otherwise the gradient of an observation.

    The largest weights, for example, are differentiated as the weights at their keys.
    Only the gradient calls `arrays_of`.
    """

    def pull_back(arguments: tuple, _: tuple, is_wanted: tuple, cotangents: Sums):
        factors, arrays = arguments[0], arrays_of(arguments[0])
        is_wanted = is_wanted[0], jax.tree.map(lambda _: None, arrays)
        pulled = _pulled_back(
            observation, sizes, factors, arrays, cotangents, is_wanted
        )
        return pulled[0], None

    return gradients.with_gradient(lambda _, sums: (sums, ()), pull_back)(
        factors, lax.stop_gradient(sums)
    )


def _pulled_back(
    observation: Observation,
    sizes: sweep.Sizes,
    factors: Factors,
    arrays: SideArrays,
    cotangents: Sums,
    is_wanted: tuple,
) -> tuple[Factors | None, SideArrays | None]:
    if not jax.tree.leaves(cotangents):
        return None, None
    return backward(observation, sizes, factors, arrays, cotangents, is_wanted)


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    observation: Observation,
    factors: Factors,
    arrays: SideArrays,
    sizes: sweep.Sizes,
    first: tiles.Origin | None = None,
) -> Sums:
    """Folds a map, or the part that begins at `first`; see `fold`."""
    *batch_shape, num_heads, _ = factors.logsumexp.shape

    def fold_head(example: tuple, head: Array) -> Sums:
        walk = Walk(observation, factors, arrays, sizes, first, example, head)
        init = walk.init()
        # Sums of queries are made block by block, from `init`, and written here.
        totals = jax.tree.map(
            lambda x: jnp.zeros((walk.num_queries, *x.shape[1:]), x.dtype),
            init.queries,
        )

        def fold_block(block: Block, sums: Sums) -> Sums:
            def add_tile(columns: tiles.Span, seen_from: Start, sums: Sums):
                relative = walk.relative_scores(block, columns, seen_from)
                tile = walk.tile(
                    relative, block, columns, walk.arrays_at(block, columns)
                )
                tile_sums = sums._replace(keys=read(sums.keys, columns))
                new = observation.add(tile, tile_sums)
                return new._replace(keys=write(sums.keys, new.keys, columns))

            new = walk.over_keys(add_tile, block, sums._replace(queries=init.queries))
            return new._replace(queries=block.write(sums.queries, new.queries))

        return walk.over_rows(fold_block, init._replace(queries=totals))

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

    def write(self, totals: Tree, new: Tree) -> Tree:
        """Writes the sums of new queries, and leaves the others as they were."""
        is_new = self.is_new
        if is_new is not None:
            new = jax.tree.map(
                lambda x, y: jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y),
                new,
                read(totals, self.rows),
            )
        return write(totals, new, self.rows)


class Walk:
    """The walk over one head of one example."""

    def __init__(
        self,
        observation: Observation,
        factors: Factors,
        arrays: SideArrays,
        sizes: sweep.Sizes,
        first: tiles.Origin | None,  # where this part of the map begins, or None
        example: tuple,
        head: Array,
    ):
        def of_head(x: Array) -> Array:
            x = tiles.at_batch(x, example)
            return x[:, 0] if x.shape[1] == 1 else x[:, head]

        self.observation, self.first = observation, first
        self.num_queries = factors.query.shape[-3]
        self.num_keys = factors.key.shape[-3]
        self.sizes = sizes.fitted(self.num_queries, self.num_keys)
        self.head = factors.head(example, head)
        self.arrays = jax.tree.map(of_head, arrays)
        self.dtype = self.head.logsumexp.dtype

    def init(self) -> Sums:
        """Makes the initial sums of a block of queries, all keys and the head."""
        return self.observation.init(
            self.sizes.rows, self.num_keys, self.arrays, self.dtype
        )

    def over_rows(self, function: Callable[[Block, Tree], Tree], carry: Tree) -> Tree:
        """Folds `function(block, carry)` over blocks of queries; returns `carry`."""
        if not self.num_keys:
            return carry

        def body(rows: tiles.Span, fresh_from: int | Array, carry: Tree) -> Tree:
            is_new = None
            if self.num_queries % self.sizes.rows:
                is_new = rows.array() >= fresh_from
            log_sum = read(self.head.log_sum, rows)
            # The exponential of any score less inf is 0: a query without weights, or
            # one that the block before had, adds nothing, at no cost per score.
            has_weights = log_sum.logsumexp != -jnp.inf
            if is_new is not None:
                has_weights &= is_new
            high = jnp.where(has_weights, log_sum.logsumexp, jnp.inf)
            log_sum = log_sum._replace(logsumexp=high)
            return function(Block(rows, is_new, log_sum), carry)

        return sweep.over_rows(body, carry, self.num_queries, self.sizes.rows)

    def over_keys(
        self,
        function: Callable[[tiles.Span, Start, Tree], Tree],
        block: Block,
        carry: Tree,
    ) -> Tree:
        """Calls `function(columns, seen_from, carry)` for the tiles of a block."""
        sizes = self.num_keys, self.sizes.columns
        weighting = self.head.weighting
        return sweep.over_keys(function, carry, weighting, block.rows, *sizes)

    def relative_scores(
        self, block: Block, columns: tiles.Span, seen_from: Start
    ) -> Array:
        """Computes scores less the log sum of their row, `[R, C]`."""
        scores = self.head.scores(block.rows, columns, seen_from)
        logsumexp, remainder = block.log_sum
        # The remainder is far below the logsumexp, and must not be rounded into it.
        return (scores - logsumexp[:, None]) - remainder[:, None]

    def arrays_at(self, block: Block, columns: tiles.Span) -> SideArrays:
        queries = read(self.arrays.queries, block.rows)
        return SideArrays(queries, read(self.arrays.keys, columns))

    def tile(
        self, relative: Array, block: Block, columns: tiles.Span, arrays: SideArrays
    ) -> Tile:
        """Builds what an observation gets of a tile, from its relative scores."""
        rows = block.rows
        if self.first is not None:
            rows, columns = self.first.rows(rows), self.first.columns(columns)
        score = self.head.weighting.score
        log_weights = jnp.maximum(score.log_weights(relative), HIDDEN)
        weights = score.weights(relative)
        return Tile(weights, log_weights, rows, columns, arrays, relative)


def read(tree: Tree, span: tiles.Span) -> Tree:
    """Reads a span of the first axis of each array."""
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, span.start, span.size, 0), tree
    )


def write(tree: Tree, new: Tree, span: tiles.Span) -> Tree:
    """Writes new values into a span of the first axis of each array."""
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, span.start, 0), tree, new
    )


class Gradients(NamedTuple):
    """The gradients of values and map, or of one head; None for an unused map."""

    query: Any  # an array, of a head `[T, K]`
    key: Any  # an array, of a head `[K, S]` while tiles are added, then `[S, K]`
    logsumexp: Any  # an array, of a head `[T]`
    bias: Any  # a `ScoreBias`; None if it is not differentiated
    score: Any  # a `Score`
    arrays: SideArrays  # None in the place of an array that is not differentiated


# The axes of heads, after B..., of the gradients of a whole map.
_HEAD_AXES = (1, 1, 0, 0, 0, 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(
    observation: Observation,
    sizes: sweep.Sizes,
    factors: Factors,
    arrays: SideArrays,
    cotangents: Sums,
    is_wanted: tuple[Factors, SideArrays],
) -> tuple[Factors | None, SideArrays]:
    """Computes the gradients of a map and of the arrays along its sides.

    `is_wanted` has None in the place of each array that is not differentiated.
    """
    wanted_map, wanted_arrays = is_wanted
    wants_map = bool(jax.tree.leaves(wanted_map))
    # The gradient of the bias may be as large as the map.
    wants_bias = bool(jax.tree.leaves(wanted_map.weighting.bias))
    # A query without a finite logsumexp has weights of 0 here, so no gradient.
    logsumexp = jnp.where(jnp.isfinite(factors.logsumexp), factors.logsumexp, -jnp.inf)
    finite = factors.with_log_sum(logsumexp)
    *batch_shape, num_heads, _ = logsumexp.shape

    def init(part: Factors, arrays: SideArrays) -> Gradients:
        """Makes the zeros with which gradients of a map, or of a head, begin."""
        array_zeros = jax.tree.map(jnp.zeros_like, _like(arrays, wanted_arrays))
        if not wants_map:
            return Gradients(None, None, None, None, None, array_zeros)
        bias = part.weighting.bias if wants_bias else None
        dtype = logsumexp.dtype  # gradients add up in the dtype of scores
        return Gradients(
            jnp.zeros_like(part.query, dtype),
            jnp.zeros_like(part.key, dtype),
            jnp.zeros_like(part.logsumexp),
            jax.tree.map(jnp.zeros_like, bias),
            jax.tree.map(jnp.zeros_like, part.weighting.score),
            array_zeros,
        )

    def head_gradients(example: tuple, head: Array, totals: tuple) -> Gradients:
        del totals
        walk = Walk(observation, finite, arrays, sizes, None, example, head)
        of_head = jax.tree.map(
            lambda x: tiles.at_batch(x, (*example, head)), cotangents
        )

        def add_block(block: Block, totals: Gradients) -> Gradients:
            queries = read(of_head.queries, block.rows)

            def add_tile(columns: tiles.Span, seen_from: Start, totals: Gradients):
                here = Sums(queries, read(of_head.keys, columns), of_head.head)
                return _add_tile(walk, totals, here, block, columns, seen_from)

            return walk.over_keys(add_tile, block, totals)

        zeros = init(walk.head, walk.arrays)
        if not wants_map:
            return walk.over_rows(add_block, zeros)
        # The gradients of keys are summed transposed, as `products.mix_transposed`
        # returns them.
        total = walk.over_rows(add_block, zeros._replace(key=zeros.key.T))
        bias, score = jax.tree.map(lambda x: x.squeeze(0), (total.bias, total.score))
        return total._replace(key=total.key.T, bias=bias, score=score)

    total = Gradients(
        *sweep.summed_over_heads(
            head_gradients,
            tuple(init(finite, arrays)),
            _HEAD_AXES,
            tuple(batch_shape),
            num_heads,
            sizes.heads,
        )
    )
    if not wants_map:
        return None, total.arrays
    map_gradient = dataclasses.replace(
        factors,
        query=total.query.astype(factors.query.dtype),
        key=total.key.astype(factors.key.dtype),
        weighting=Weighting(NO_GRADIENT, total.bias, total.score, origin=NO_GRADIENT),
        log_sum=LogSum(total.logsumexp, NO_GRADIENT),
    )
    return map_gradient, total.arrays


def _add_tile(
    walk: Walk,
    totals: Gradients,
    cotangents: Sums,
    block: Block,
    columns: tiles.Span,
    seen_from: Start,
) -> Gradients:
    """Adds a tile to the gradients of a head."""
    observation, rows = walk.observation, block.rows
    relative = walk.relative_scores(block, columns, seen_from)
    tile_arrays = walk.arrays_at(block, columns)
    is_hidden = relative < HIDDEN / 2

    def sums(relative: Array, differentiated: SideArrays) -> Sums:
        """Computes what the tile adds, as a function of what has a gradient."""
        arrays = jax.tree.map(
            lambda x, new: x if new is None else new, tile_arrays, differentiated
        )
        tile = walk.tile(relative, block, columns, arrays)
        # Inside the differentiated function, as `where` has no gradient for masked
        # pairs: numbers of 1e38 for a masked key would make it 0 x inf.
        tile = tile._replace(
            weights=jnp.where(is_hidden, 0, tile.weights),
            log_weights=jnp.where(is_hidden, _LOW, tile.log_weights),
        )
        # Sums add up, so that the derivative does not depend on the sums so far.
        init = observation.init(rows.size, columns.size, arrays, walk.dtype)
        return _like(observation.add(tile, init), cotangents)

    _, pullback = jax.vjp(sums, relative, _like(tile_arrays, totals.arrays))
    scores_grad, arrays_grad = pullback(cotangents)
    if totals.query is not None:
        weighting = walk.head.weighting
        query_grad, key_grad, score_grad = weighting.score.gradients(
            tiles.take(walk.head.query, rows, 0)[:, None],
            tiles.take(walk.head.key, columns, 0)[:, None],
            scores_grad[None],
        )
        bias = totals.bias
        if bias is not None and weighting.bias is not None:
            at = weighting.origin.at(rows, columns)
            bias = weighting.bias.add_gradient(bias, scores_grad[None], *at)
        totals = totals._replace(
            query=tiles.add(totals.query, query_grad[:, 0], rows.start, 0),
            key=tiles.add(totals.key, key_grad[:, 0].T, columns.start, 1),
            # A relative score falls as the logsumexp of its row rises.
            logsumexp=tiles.add(totals.logsumexp, -scores_grad.sum(-1), rows.start, 0),
            bias=bias,
            score=jax.tree.map(jnp.add, totals.score, score_grad),
        )

    def added(totals: Tree, parts: Tree, span: tiles.Span) -> Tree:
        return jax.tree.map(
            lambda total, x: tiles.add(total, x, span.start, 0), totals, parts
        )

    return totals._replace(
        arrays=SideArrays(
            added(totals.arrays.queries, arrays_grad.queries, rows),
            added(totals.arrays.keys, arrays_grad.keys, columns),
        )
    )


def _like(tree: Tree, example: Tree) -> Tree:
    """Replaces the leaves of a tree with None where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, example)
