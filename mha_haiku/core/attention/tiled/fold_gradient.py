"""The fold over a map's tiles, differentiable in reverse mode by a second walk.

What a tile adds to the sums is a function of its log weights and of what is given,
which JAX differentiates. Sums add up over the tiles, so every tile has the cotangents
of the whole sums, and nothing of size T x S is kept: the gradient recomputes log
weights from the scores, as attention's gradient does. As a log weight is a score less
the logsumexp, the gradient takes two paths: to queries, keys and bias here, and by the
logsumexp into the gradient of the attention that made it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from mha_haiku.core import tiles
from mha_haiku.core.attention import reverse_only
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.observation import Given, Observation, Sums, Tree
from mha_haiku.core.attention.tiled import sweep, views
from mha_haiku.core.attention.tiled.fold import Walk, forward, take
from mha_haiku.core.attention.weighting import Weighting

Array = jax.Array

# A log weight in place of HIDDEN, where products with large cotangents must stay
# finite: exp of it is 0 in float64 too.
_LOW = -1e4

_REFUSAL = (
    "observations of an attention map have first derivatives alone, in reverse mode "
    "(jax.grad, jax.vjp); a second one, and forward mode, have to be made from its "
    "weights(), of attention by implementation='formula'."
)

# What runs a fold over maps that devices share: under "forward" a function with the
# arguments of `fold`. `attention.sharded` enters it, so that the core need not know of
# it. Gradients need none: `backward` runs on whole arrays, on a mesh too.
SHARED: dict[str, Callable] = {}


def fold(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    mesh: jax.sharding.Mesh | None = None,
) -> Sums:
    """Folds an observation over all tiles; differentiable in reverse mode.

    `maps` is one map; or two, of as many queries and keys, that stand side by side:
    then sums are of `[B..., ...]`, without heads.
    """

    def run(maps, given):
        if mesh is not None:
            return SHARED["forward"](observation, maps, given, sizes, mesh)
        return forward(observation, maps, given, sizes)

    def pull_back(maps, given, cotangents, wanted):
        return backward(observation, maps, given, cotangents, sizes, wanted)

    return _differentiable(run, pull_back)(maps, given)


def known(
    sums: Sums,
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given | Callable[[tuple[views.Factors, ...]], Given],
    sizes: sweep.Sizes,
) -> Sums:
    """Gives sums that are known already the gradient of an observation.

    The largest weights, say, are differentiated as the weights at the keys where they
    stand. `given` may be a function from the maps, which only a gradient calls.
    """
    is_given = not callable(given)

    def run(maps, arguments):
        return arguments[0]

    def pull_back(maps, arguments, cotangents, wanted):
        own = arguments[1] if is_given else given(maps)
        wanted = dataclasses.replace(wanted, given=(False,) * len(jax.tree.leaves(own)))
        maps_grad, _ = backward(observation, maps, own, cotangents, sizes, wanted)
        return maps_grad, None

    arguments = lax.stop_gradient((sums, given if is_given else ()))
    return _differentiable(run, pull_back)(maps, arguments)


@tiles.pytree
class Wanted:
    """Which gradients are wanted."""

    maps: bool = tiles.static()  # the gradient of anything in the maps
    biases: tuple[bool, ...] = tiles.static()  # for each map, the gradient of its bias
    given: tuple[bool, ...] = tiles.static()  # for each array


def _differentiable(run: Callable, pull_back: Callable) -> Callable:
    """Gives `run(maps, given)`, which returns sums, the gradient `pull_back`."""

    # With symbolic zeros JAX says which inputs are differentiated (`perturbed`) and
    # which sums came to nothing (`SymbolicZero`), so that neither costs anything.
    def forward_rule(maps, given):
        wanted = Wanted(
            _is_perturbed(maps),
            tuple(_is_perturbed(each.weighting.bias) for each in maps),
            tuple(x.perturbed for x in jax.tree.leaves(given)),
        )
        maps, given = jax.tree.map(lambda x: x.value, (maps, given))
        return run(maps, given), (maps, given, wanted)

    def backward_rule(saved, cotangents):
        maps, given, wanted = saved
        cotangents = jax.tree.map(
            lambda x: None if isinstance(x, SymbolicZero) else x, cotangents
        )
        if not jax.tree.leaves(cotangents):
            return None, None
        return _once(
            functools.partial(pull_back, wanted=wanted), maps, given, cotangents
        )

    function = jax.custom_vjp(run)
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return lambda maps, given: function(
        *reverse_only.reverse_only((maps, given), _REFUSAL)
    )


def _is_perturbed(primals):
    return any(x.perturbed for x in jax.tree.leaves(primals))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(function, *arguments):
    """Calls `function(*arguments)`, which cannot be differentiated again."""
    return function(*arguments)


@_once.defjvp
def _refuse(*_):
    raise ValueError(_REFUSAL)


@functools.partial(jax.jit, static_argnums=(0, 4))
def backward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    cotangents: Sums,
    sizes: sweep.Sizes,
    wanted: Wanted,
) -> tuple[tuple[views.Factors, ...], Given]:
    """Computes the gradients of maps and of what is given, None where not wanted."""
    # A query without a finite logsumexp has no weights here, and so no gradient.
    finite = tuple(
        each._replace(
            logsumexp=jnp.where(jnp.isfinite(each.logsumexp), each.logsumexp, -jnp.inf)
        )
        for each in maps
    )
    *batch_shape, num_heads, _ = maps[0].logsumexp.shape
    batch_shape, is_alone = tuple(batch_shape), not observation.side_by_side

    def zeros_of(parts):
        pairs = zip(parts, wanted.biases, strict=True) if wanted.maps else ()
        return [_zeros(part, wants_bias) for part, wants_bias in pairs]

    def head_gradients(example, head, totals=()):
        del totals
        walk = Walk.of(observation, finite, given, sizes, None, example, head)
        at = (*example, head) if is_alone else example
        own = jax.tree.map(lambda x: tiles.at_batch(x, at), cotangents)

        def add_block(block, totals):
            queries = take(own.queries, block.at)

            def add_tile(columns, seen_from, totals):
                here = Sums(queries, take(own.keys, columns), own.head)
                return _add_tile(walk, totals, here, block, columns, seen_from)

            return walk.over_keys(add_tile, block, totals)

        # Keys' gradients are summed transposed, as `products.gather` makes them.
        zeros = tuple(x._replace(key=x.key.mT) for x in zeros_of(walk.heads))
        given_zeros = jax.tree.map(jnp.zeros_like, _chosen(walk.given, wanted.given))
        map_grads, given_grad = walk.over_rows(add_block, (zeros, given_zeros))
        finished = _finished if is_alone else jax.vmap(_finished)
        return by_head_axis([finished(each) for each in map_grads], given_grad)

    def by_head_axis(map_grads, given_grad):
        vectors = tuple((x.query, x.key) for x in map_grads)
        others = tuple((x.weighting, x.logsumexp) for x in map_grads)
        return vectors, others, given_grad

    axes = (1, 0, 1)  # where the heads stand, after B..., in what that returns
    totals = by_head_axis(
        zeros_of(maps), jax.tree.map(jnp.zeros_like, _chosen(given, wanted.given))
    )
    if is_alone:
        vectors, others, given_grad = sweep.summed_over_heads(
            head_gradients, totals, axes, batch_shape, num_heads, sizes.heads
        )
    else:
        stacked = sweep.over_heads(head_gradients, batch_shape, 1, sizes.heads)
        vectors, others, given_grad = _placed_together(
            stacked, totals, axes, len(batch_shape)
        )
    if not wanted.maps:
        return (None,) * len(maps), given_grad
    map_grads = (
        views.Factors(query.astype(each.query.dtype), key.astype(each.key.dtype), *rest)
        for each, (query, key), rest in zip(maps, vectors, others, strict=True)
    )
    return tuple(map_grads), given_grad


def _add_tile(walk, totals, cotangents, block, columns, seen_from) -> tuple:
    """Adds a tile to the gradients of a head (of keys `[K, S]`)."""
    map_grads, given_grad = totals
    observation, dtype = walk.observation, walk.heads[0].logsumexp.dtype
    log_weights = walk.log_weights(block, columns, seen_from)
    own = walk.given_of(block, columns)
    is_wanted = tuple(x is not None for x in _leaves(given_grad))

    def sums(log_weights, wanted):
        pairs = zip(jax.tree.leaves(own), _leaves(wanted), strict=True)
        given = [x if new is None else new for x, new in pairs]
        given = jax.tree.unflatten(jax.tree.structure(own), given)
        # Part of what is differentiated, as `where` has no gradient for masked pairs:
        # numbers of 1e38 given for a masked key would make it 0 x inf.
        log_weights = jax.tree.map(
            lambda x: jnp.where(x < HIDDEN / 2, _LOW, x), log_weights
        )
        tile = walk.tile_of(log_weights, block, columns, given)
        nothing = observation.nothing(block.rows.size, columns.size, given, dtype)
        pairs = zip(
            _leaves(observation.add(tile, nothing)), _leaves(cotangents), strict=True
        )
        return [x for x, cotangent in pairs if cotangent is not None]

    _, pullback = jax.vjp(sums, log_weights, _chosen(own, is_wanted))
    log_weights_grad, own_grad = pullback(jax.tree.leaves(cotangents))

    def add(total, head, scores_grad):
        weighting, grads = head.weighting, total.weighting
        query_grad, key_grad, score_grad = weighting.score.gradients(
            tiles.take(head.query, block.rows, 0)[:, None],
            tiles.take(head.key, columns, 0)[:, None],
            scores_grad[None],
        )
        grads = grads._replace(score=jax.tree.map(jnp.add, grads.score, score_grad))
        if grads.bias is not None:
            at = weighting.origin.at(block.rows, columns)
            bias = weighting.bias.add_gradient(grads.bias, scores_grad[None], *at)
            grads = grads._replace(bias=bias)
        start = block.rows.start
        return views.Factors(
            tiles.add(total.query, query_grad[:, 0], start, 0),
            tiles.add(total.key, key_grad[:, 0].T, columns.start, 1),
            grads,
            tiles.add(total.logsumexp, -scores_grad.sum(-1), start, 0),
        )

    if observation.side_by_side:
        add = jax.vmap(add)
    if map_grads:
        map_grads = tuple(map(add, map_grads, walk.heads, log_weights_grad))

    def added(totals, parts, span):
        return jax.tree.map(
            lambda total, x: tiles.add(total, x, span.start, 0), totals, parts
        )

    return map_grads, Given(
        added(given_grad.queries, own_grad.queries, block.rows),
        added(given_grad.keys, own_grad.keys, columns),
    )


def _zeros(part: views.Factors, wants_bias: bool) -> views.Factors:
    """Makes the zeros with which the gradients of a map, or of a head, begin."""
    query, key, weighting, logsumexp = part
    bias = weighting.bias if wants_bias else None
    weighting = Weighting(None, bias, weighting.score, origin=None)
    return views.Factors(
        jnp.zeros_like(query, logsumexp.dtype),
        jnp.zeros_like(key, logsumexp.dtype),
        *jax.tree.map(jnp.zeros_like, (weighting, logsumexp)),
    )


def _finished(gradients: views.Factors) -> views.Factors:
    """Lays out the gradients of a head as in the gradients of all heads."""
    weighting = jax.tree.map(lambda x: x.squeeze(0), gradients.weighting)
    return gradients._replace(key=gradients.key.T, weighting=weighting)


def _placed_together(stacked: tuple, totals: tuple, axes: tuple, at: int) -> tuple:
    """Puts gradients `[B..., 1, H, ...]` of heads side by side in their places."""
    *map_grads, given_grad = stacked
    map_grads = jax.tree.map(lambda x: x.squeeze(at), map_grads)
    return tuple(
        jax.tree.map(
            lambda total, x, axis=axis: sweep.placed(x, total.shape, axis, at), *pair
        )
        for axis, *pair in zip(axes, totals, [*map_grads, given_grad], strict=True)
    )


def _chosen(tree: Tree, is_chosen: tuple[bool, ...]) -> Tree:
    """Replaces the leaves of a tree that are not chosen with None."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, is_chosen, strict=True)
    return jax.tree.unflatten(structure, [x if ok else None for x, ok in pairs])


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)
