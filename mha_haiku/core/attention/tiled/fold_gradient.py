"""The fold over a map's tiles, differentiable in reverse mode by a second walk.

What a tile adds to the sums is a function of its relative scores and the `Given`
arrays, which JAX differentiates. Sums add up over the tiles, so every tile has the
cotangents of the whole sums, and nothing of size T x S is kept: the gradient recomputes
scores, as attention's gradient does. As a relative score is a score less the logsumexp,
the gradient takes two paths: to queries, keys and bias here, and through the logsumexp
into the gradient of the attention that computed it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import custom_gradient
from mha_haiku.core.attention.custom_gradient import NO_GRADIENT
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.log_sum import LogSum
from mha_haiku.core.attention.observation import Given, Observation, Sums, Tree
from mha_haiku.core.attention.tiled import sweep
from mha_haiku.core.attention.tiled.fold import Walk, forward, take
from mha_haiku.core.attention.weighting import Weighting

if TYPE_CHECKING:
    from mha_haiku.core.attention.attention_map import AttentionMap

Array = jax.Array

# The log of a weight of 0, whose products with large cotangents must be finite.
_LOW = -1e4

_REFUSAL = (
    "observations of an attention map have only first derivatives, in reverse mode "
    "(jax.grad, jax.vjp); for second derivatives or forward mode, compute from the "
    "map's weights(), with implementation='formula'."
)


def fold(
    observation: Observation, asked: "AttentionMap", given: Given, sizes: sweep.Sizes
) -> Sums:
    """Folds an observation over all tiles; differentiable in reverse mode."""

    def run(asked, given):
        # The gradient runs on whole arrays, even if they are sharded.
        walk = forward if asked.fold is None else asked.fold
        return walk(observation, sweep.Factors.of(asked), given, sizes), ()

    def pull_back(arguments, _, is_wanted, cotangents):
        asked, given = arguments
        return _pulled_back(observation, asked, given, cotangents, sizes, is_wanted)

    return custom_gradient.differentiable(run, pull_back, _REFUSAL)(asked, given)


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

    def pull_back(arguments, _, is_wanted, cotangents):
        asked, given_arrays = arguments[0], given(arguments[0])
        is_wanted = is_wanted[0], jax.tree.map(lambda _: None, given_arrays)
        pulled = _pulled_back(
            observation, asked, given_arrays, cotangents, sizes, is_wanted
        )
        return pulled[0], None

    return custom_gradient.differentiable(
        lambda _, sums: (sums, ()), pull_back, _REFUSAL
    )(asked, lax.stop_gradient(sums))


def _pulled_back(observation, asked, given, cotangents, sizes, is_wanted) -> tuple:
    if not jax.tree.leaves(cotangents):
        return None, None
    function = functools.partial(backward, observation, sizes)
    return _once(function, asked, given, cotangents, is_wanted)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(function, *arguments):
    """Calls `function(*arguments)`; the result cannot be differentiated."""
    return function(*arguments)


@_once.defjvp
def _refuse(*_):
    raise ValueError(_REFUSAL)


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

    def zeros_of(part, given):
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

    def head_gradients(example, head, totals):
        del totals
        walk = Walk(observation, finite, given, sizes, None, example, head)
        of_head = jax.tree.map(
            lambda x: tiles.at_batch(x, (*example, head)), cotangents
        )

        def add_block(block, totals):
            queries = take(of_head.queries, block.rows)

            def add_tile(columns, seen_from, totals):
                here = Sums(queries, take(of_head.keys, columns), of_head.head)
                return _add_tile(walk, totals, here, block, columns, seen_from)

            return walk.over_keys(add_tile, block, totals)

        # The gradients of keys are summed transposed, as `products.gather` returns
        # them.
        zeros, given_zeros = zeros_of(walk.head, walk.given)
        zeros = zeros and zeros._replace(key=zeros.key.T)
        map_grad, given_grad = walk.over_rows(add_block, (zeros, given_zeros))
        if map_grad is not None:
            weighting = jax.tree.map(lambda x: x.squeeze(0), map_grad.weighting)
            map_grad = map_grad._replace(key=map_grad.key.T, weighting=weighting)
        return by_head_axis(map_grad, given_grad)

    def by_head_axis(map_grad, given_grad):
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


def _add_tile(walk, totals, cotangents, block, columns, seen_from) -> tuple:
    """Adds a tile to the gradients of a head (the gradient of keys is `[K, S]`)."""
    map_grad, given_grad = totals
    observation, dtype = walk.observation, walk.dtype
    relative = walk.relative_scores(block, columns, seen_from)
    of_tile = walk.given_of(block, columns)
    is_hidden = relative < HIDDEN / 2

    def sums(relative, wanted):
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

    def added(totals, parts, span):
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
