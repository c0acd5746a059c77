"""One walk over the tiles of a map, which runs whatever is asked of it.

`B...` batch axes, T query positions, R of them in a block; S key positions, C of them
in a tile; H heads. An observation says what it carries and what a tile adds; the walk
skips tiles that the mask rules out and holds no `[T, S]` array. The gradient walks over
the same tiles once more: what a tile adds is a pure function of its log weights, so its
cotangent is that of the sums, and scores are differentiated as attention's own are.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from mha_haiku import tiles
from mha_haiku.attention import sweep, views

Array = jax.Array
Tree = Any  # a pytree of arrays

# A log weight in place of views.HIDDEN, where products with large cotangents must stay
# finite: exp of it is 0 in float64 too.
_LOW = -1e4


# What runs a fold over maps that devices share, "forward" as `fold` does with a mesh
# too; `attention.sharded` enters it, so that the core need not know of it.
SHARED: dict[str, Callable] = {}


class Sums(NamedTuple):
    """What an observation carries; pytrees of arrays, each of which may be empty.

    Attributes:
      queries: `[T, ...]`, or `[R, ...]` in a block: over the keys of each query.
      keys: `[S, ...]`, or `[C, ...]` in a tile: over the queries of each key.
      head: Of the whole head; any shape.
    """

    queries: Tree = ()
    keys: Tree = ()
    head: Tree = ()


class Given(NamedTuple):
    """Arrays that an observation needs; pytrees.

    Attributes:
      queries: `[B..., T, H, ...]`, where axes of B... and H may have size 1 for all;
        without B... and H, `[R, ...]`, in a tile.
      keys: `[B..., S, H, ...]`, likewise; `[C, ...]` in a tile.
    """

    queries: Tree = ()
    keys: Tree = ()


NOTHING_GIVEN = Given()


class Tile(NamedTuple):
    """A tile of one head of one example.

    Attributes:
      weights: `[R, C]`; of an observation that is `side_by_side` a tuple, of each of
        its maps `[H, R, C]`. Queries that another block has counted weigh nothing.
      log_weights: Their logarithms, finite and very low where they are 0.
      rows: Which queries of the map they are.
      columns: Which keys.
      given: What was given of these queries and keys.
    """

    weights: Array
    log_weights: Array
    rows: tiles.Span
    columns: tiles.Span
    given: Given


class Observation(abc.ABC):
    """What can be asked of a map: a frozen dataclass of what is static."""

    # Whether a tile has all heads of one or two maps, so that they can be compared.
    side_by_side: ClassVar[bool] = False

    @abc.abstractmethod
    def nothing(
        self, num_queries: int, num_keys: int, given: Given, dtype: jnp.dtype
    ) -> Sums:
        """Returns the sums of R queries, S keys and a head before any tile.

        Args:
          num_queries: R.
          num_keys: S.
          given: What was given, of one head.
          dtype: Of the weights.
        """

    @abc.abstractmethod
    def add(self, tile: Tile, sums: Sums) -> Sums:
        """Returns the sums of a tile's queries, keys and head after the tile.

        To be differentiated it has to add to the sums; what it does otherwise (the
        largest so far) has to be of `lax.stop_gradient(tile.weights)`.
        """

    def merge(self, first: Tree, second: Tree) -> Tree:
        """Returns the sums of queries over the keys that two devices have looked at.

        Sums of keys and of the head add up.
        """
        return jax.tree.map(jnp.add, first, second)

    def part(self, num_queries: int, num_keys: int) -> tuple[range, range]:
        """Returns the consecutive queries and keys that are of interest."""
        return range(num_queries), range(num_keys)


def fold(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    mesh: jax.sharding.Mesh | None = None,
) -> Sums:
    """Returns what an observation carries after all tiles; differentiable in reverse.

    Args:
      observation: What is asked.
      maps: One map; or two, of as many queries and keys, that stand side by side.
      given: The arrays that it needs.
      sizes: Of the tiles.
      mesh: The devices that share the maps, or None.

    Returns:
      Sums of `[B..., H, T, ...]`, `[B..., H, S, ...]` and `[B..., H, ...]`; `[B...,
      ...]` each where heads stand side by side.
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
    """Returns sums that are known already, with the gradient of an observation.

    The largest weights, say, are differentiated as the weights at the keys where they
    stand.

    Args:
      sums: What the observation would add up to.
      observation: The one that is differentiated.
      maps: As in `fold`.
      given: What it is given, or what returns it from the maps, in a gradient alone.
      sizes: Of the tiles.
    """
    is_given = not callable(given)

    def run(maps, arguments):
        return arguments[0]

    def pull_back(maps, arguments, cotangents, wanted):
        own = arguments[1] if is_given else given(maps)
        wanted = dataclasses.replace(wanted, given=(False,) * len(jax.tree.leaves(own)))
        of_maps, _ = backward(observation, maps, own, cotangents, sizes, wanted)
        return of_maps, None

    arguments = lax.stop_gradient((sums, given if is_given else ()))
    return _differentiable(run, pull_back)(maps, arguments)


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    first: tiles.Origin | None = None,
) -> Sums:
    """Returns the sums of a map, or of a part of one; see `fold`.

    Args:
      observation: What is asked.
      maps: As in `fold`.
      given: As in `fold`.
      sizes: Of the tiles.
      first: Where in the whole map a part begins; None: it is whole.
    """
    *batch_shape, num_heads, _ = maps[0].logsumexp.shape
    if observation.side_by_side:
        num_heads = 1

    def of_head(example, head):
        walk = _walk(observation, maps, given, sizes, first, example, head)
        nothing = walk.nothing()
        totals = jax.tree.map(
            lambda x: jnp.zeros((len(walk.queries), *x.shape[1:]), x.dtype),
            nothing.queries,
        )

        def of_block(block, sums):
            def of_tile(columns, seen_from, sums):
                tile = walk.tile(block, columns, seen_from)
                own = sums._replace(keys=_take(sums.keys, columns))
                new = observation.add(tile, own)
                return new._replace(keys=_put(sums.keys, new.keys, columns))

            new = walk.over_keys(of_tile, block, sums._replace(queries=nothing.queries))
            return new._replace(queries=block.put(sums.queries, new.queries))

        return walk.over_rows(of_block, nothing._replace(queries=totals))

    sums = sweep.over_heads(of_head, tuple(batch_shape), num_heads, sizes.heads)
    if observation.side_by_side:
        sums = jax.tree.map(lambda x: x.squeeze(len(batch_shape)), sums)
    return sums


@tiles.pytree(meta=("maps", "biases", "given"))
class Wanted:
    """What a gradient is wanted of.

    Attributes:
      maps: Whether of anything in the maps.
      biases: Of each map's bias.
      given: Of each array that is given.
    """

    maps: bool
    biases: tuple[bool, ...]
    given: tuple[bool, ...]


def _differentiable(run: Callable, pull_back: Callable) -> Callable:
    """Returns `run(maps, given)` with a gradient of its own.

    Args:
      run: Returns sums.
      pull_back: From maps, given, cotangents of the sums (None for those of 0) and
        `Wanted` to the gradients of maps and given.
    """

    def forward_rule(maps, given):
        wanted = Wanted(
            _is_perturbed(maps),
            tuple(_is_perturbed(each.bias) for each in maps),
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
    return function


def _is_perturbed(primals):
    return any(x.perturbed for x in jax.tree.leaves(primals))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _once(function, *arguments):
    """Returns `function(*arguments)`, which cannot be differentiated again."""
    return function(*arguments)


@_once.defjvp
def _refuse(*_):
    raise ValueError(
        "observations of an attention map have first derivatives alone, in reverse "
        "mode; a second one has to be made from its weights(), of attention by "
        "implementation='formula'."
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def backward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    cotangents: Sums,
    sizes: sweep.Sizes,
    wanted: Wanted,
) -> tuple[tuple[views.Factors, ...], Given]:
    """Returns the gradients of maps and of what is given, None where not wanted.

    Args:
      observation: What is asked.
      maps: As in `fold`.
      given: As in `fold`.
      cotangents: Of the sums, None for those of 0.
      sizes: Of the tiles.
      wanted: What a gradient is wanted of.
    """
    # A query without a finite logsumexp has no weights here, and so no gradient.
    finite = tuple(
        each._replace(
            logsumexp=jnp.where(jnp.isfinite(each.logsumexp), each.logsumexp, -jnp.inf)
        )
        for each in maps
    )
    *batch_shape, num_heads, _ = maps[0].logsumexp.shape
    batch_shape, is_alone = tuple(batch_shape), not observation.side_by_side

    def of_head(example, head, totals=()):
        del totals
        walk = _walk(observation, finite, given, sizes, None, example, head)
        at = (*example, head) if is_alone else example
        of_sums = jax.tree.map(lambda x: tiles.at_batch(x, at), cotangents)

        def of_block(block, totals):
            of_queries = _take(of_sums.queries, block.rows)

            def of_tile(columns, seen_from, totals):
                own = Sums(of_queries, _take(of_sums.keys, columns), of_sums.head)
                return walk.add_gradients(totals, own, block, columns, seen_from)

            return walk.over_keys(of_tile, block, totals)

        of_maps, of_given = walk.over_rows(of_block, walk.no_gradients(wanted))
        finished = _finished if is_alone else jax.vmap(_finished)
        return *(x for each in of_maps for x in finished(each)), of_given

    dtype = maps[0].logsumexp.dtype
    totals = []
    for each, wants_bias in zip(maps, wanted.biases, strict=True):
        arrays = each.query, each.key, each.logsumexp
        zeros = *(jnp.zeros(x.shape, dtype) for x in arrays), each.bias, each.score
        zeros = jax.tree.map(jnp.zeros_like, zeros)
        totals += zeros if wants_bias else (*zeros[:3], None, zeros[4])
    if not wanted.maps:
        totals = [None] * len(totals)
    totals.append(jax.tree.map(jnp.zeros_like, _chosen(given, wanted.given)))
    axes = (1, 1, 0, 0, 0) * len(maps) + (1,)  # of the heads, after B...
    if is_alone:
        found = sweep.summed_over_heads(
            of_head, tuple(totals), axes, batch_shape, num_heads, sizes.heads
        )
    else:
        at_heads = len(batch_shape)
        *found, of_given = sweep.over_heads(of_head, batch_shape, 1, sizes.heads)
        found = jax.tree.map(lambda x: x.squeeze(at_heads), found)
        found = [
            jax.tree.map(
                lambda total, x, axis=axis: sweep.placed(
                    x, total.shape, axis, at_heads
                ),
                *pair,
            )
            for axis, *pair in zip(axes, totals, [*found, of_given], strict=True)
        ]
    *found, of_given = found
    of_maps = [
        views.Factors(
            query.astype(each.query.dtype),
            key.astype(each.key.dtype),
            None,
            bias,
            score,
            logsumexp,
            None,
        )
        if wanted.maps
        else None
        for each, (query, key, logsumexp, bias, score) in zip(
            maps, zip(*[iter(found)] * 5, strict=True), strict=True
        )
    ]
    return tuple(of_maps), of_given


def _finished(gradients):
    """Returns the gradients of a head as they stand in those of all heads."""
    if gradients is None:
        return (None,) * 5
    query, key, logsumexp, *of_one_head = gradients
    return query, key.T, logsumexp, *jax.tree.map(lambda x: x.squeeze(0), of_one_head)


def _chosen(tree: Tree, is_chosen: tuple[bool, ...]) -> Tree:
    """Returns a tree with None in place of the leaves that are not chosen."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, is_chosen, strict=True)
    return jax.tree.unflatten(structure, [x if ok else None for x, ok in pairs])


def _leaves(tree: Tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


class _Block(NamedTuple):
    """A block of queries.

    Attributes:
      rows: Which queries.
      start: The first of those that are walked over.
      is_new: `[R]`, which queries no block before had; None: all.
      normalizers: Per map `[R]`, or `[H, R]` side by side: the logsumexp, but very high
        where a query is to have no weights.
    """

    rows: tiles.Span
    start: int
    is_new: Array | None
    normalizers: tuple[Array, ...]

    def put(self, totals: Tree, new: Tree) -> Tree:
        """Returns `totals` with the sums of the block at their place."""
        at = self.rows + (-self.start)
        if self.is_new is not None:
            old = _take(totals, at)
            new = jax.tree.map(
                lambda x, y: jnp.where(
                    self.is_new.reshape(-1, *[1] * (x.ndim - 1)), x, y
                ),
                new,
                old,
            )
        return _put(totals, new, at)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The walk over one head, or over the heads of an example side by side.

    Attributes:
      observation: What is asked.
      heads: Of each map the head; side by side with an axis of heads in front.
      given: What was given of the head.
      sizes: Of the tiles.
      first: Where in the whole map this part begins, or None.
      queries: The queries that are walked over.
      keys: The keys, likewise.
    """

    observation: Observation
    heads: tuple[views.Head, ...]
    given: Given
    sizes: sweep.Sizes
    first: tiles.Origin | None
    queries: range
    keys: range

    def nothing(self) -> Sums:
        """Returns what a block of queries, all keys and the head begin with."""
        return self.observation.nothing(
            self.sizes.rows, self.num_keys, self.given, self.heads[0].logsumexp.dtype
        )

    @property
    def num_keys(self) -> int:
        """S."""
        return self.heads[0].key.shape[-2]

    def over_rows(self, of_block: Callable[[_Block, Tree], Tree], carry: Tree) -> Tree:
        """Returns `carry` after `of_block(block, carry)` of each block of queries."""
        start, size = self.queries.start, len(self.queries)

        def body(rows, fresh_from, carry):
            is_new = None
            if size % self.sizes.rows:
                is_new = rows.array() >= fresh_from
            rows += start
            normalizers = tuple(
                _normalizer(tiles.take(head.logsumexp, rows, -1), is_new)
                for head in self.heads
            )
            return of_block(_Block(rows, start, is_new, normalizers), carry)

        return sweep.over_rows(body, carry, size, self.sizes.rows)

    def over_keys(
        self, of_tile: Callable[[tiles.Span, Any, Tree], Tree], block: _Block, carry
    ) -> Tree:
        """Returns `carry` after `of_tile(columns, seen_from, carry)` of a block."""
        # Two maps may have two masks, which rule out no tile together. Heads of a mask
        # may differ in its array alone, which rules out no tile either.
        mask = self.heads[0].mask if len(self.heads) == 1 else None
        origin = self.heads[0].origin
        if self.observation.side_by_side:
            mask, origin = jax.tree.map(lambda x: x[0], (mask, origin))
        return sweep.over_keys(
            of_tile,
            carry,
            mask,
            block.rows,
            self.num_keys,
            self.sizes.columns,
            (self.keys.start, self.keys.stop),
            origin,
        )

    def log_weights(self, block: _Block, columns: tiles.Span, seen_from: Any) -> tuple:
        """Returns the log weights of a tile, of each map."""

        def of_head(head, normalizer):
            scores = head.scores(block.rows, columns, seen_from)
            return scores - normalizer[:, None]

        of_heads = jax.vmap(of_head) if self.observation.side_by_side else of_head
        return tuple(map(of_heads, self.heads, block.normalizers))

    def tile(self, block: _Block, columns: tiles.Span, seen_from: Any) -> Tile:
        """Returns a tile."""
        given = Given(
            _take(self.given.queries, block.rows), _take(self.given.keys, columns)
        )
        return self.tile_of(
            self.log_weights(block, columns, seen_from), block, columns, given
        )

    def no_gradients(self, wanted: Wanted) -> tuple:
        """Returns what gradients of each map's head and of the given begin with."""
        dtype = self.heads[0].logsumexp.dtype

        def of_head(head, wants_bias):
            if not wanted.maps:
                return None
            return (
                jnp.zeros(head.query.shape, dtype),
                # Transposed, as sums over queries are made fastest.
                jnp.zeros((*head.key.shape[:-2], *head.key.shape[:-3:-1]), dtype),
                jnp.zeros(head.logsumexp.shape, dtype),
                jax.tree.map(jnp.zeros_like, head.bias) if wants_bias else None,
                jax.tree.map(jnp.zeros_like, head.score),
            )

        of_heads = tuple(map(of_head, self.heads, wanted.biases))
        given = _chosen(self.given, wanted.given)
        return of_heads, jax.tree.map(jnp.zeros_like, given)

    def add_gradients(
        self,
        totals: tuple,
        cotangents: Sums,
        block: _Block,
        columns: tiles.Span,
        seen_from: Any,
    ) -> tuple:
        """Returns gradients with what a tile adds to them.

        What a tile adds to the sums is a pure function of its log weights and of what
        is given, which JAX differentiates; cotangents of sums are the same for all
        tiles, as these add up.

        Args:
          totals: As `no_gradients` returns them.
          cotangents: Of the sums of the tile's queries, keys and head, or None.
          block: The queries.
          columns: The keys.
          seen_from: As `views.Head.scores` takes it.
        """
        of_maps, of_given = totals
        log_weights = self.log_weights(block, columns, seen_from)
        log_weights = jax.tree.map(
            lambda x: jnp.where(x < views.HIDDEN / 2, _LOW, x), log_weights
        )
        own = Given(
            _take(self.given.queries, block.rows), _take(self.given.keys, columns)
        )
        leaves, structure = jax.tree.flatten(own)
        is_wanted = [x is not None for x in _leaves(of_given)]
        dtype = self.heads[0].logsumexp.dtype

        def sums(log_weights, floats):
            merged = [
                x if new is None else new
                for x, new in zip(leaves, _leaves(floats), strict=True)
            ]
            given = jax.tree.unflatten(structure, merged)
            tile = self.tile_of(log_weights, block, columns, given)
            nothing = self.observation.nothing(
                block.rows.size, columns.size, given, dtype
            )
            found = _leaves(self.observation.add(tile, nothing))
            pairs = zip(found, _leaves(cotangents), strict=True)
            return [x for x, cotangent in pairs if cotangent is not None]

        _, pullback = jax.vjp(sums, log_weights, _chosen(own, is_wanted))
        of_weights, of_own = pullback(jax.tree.leaves(cotangents))

        def add(total, head, of_scores):
            query, key, logsumexp, bias, score = total
            of_query, of_key, of_score = head.score.gradients(
                tiles.take(head.query, block.rows, 0)[:, None],
                tiles.take(head.key, columns, 0)[:, None],
                of_scores[None],
            )
            if bias is not None:
                bias = head.bias.add_gradient(
                    bias,
                    of_scores[None],
                    head.origin.rows(block.rows),
                    head.origin.columns(columns),
                )
            return (
                tiles.add(query, of_query[:, 0], block.rows.start, 0),
                tiles.add(key, of_key[:, 0].T, columns.start, 1),
                tiles.add(logsumexp, -of_scores.sum(-1), block.rows.start, 0),
                bias,
                jax.tree.map(jnp.add, score, of_score),
            )

        if self.observation.side_by_side:
            add = jax.vmap(add)
        if of_maps[0] is not None:
            of_maps = tuple(map(add, of_maps, self.heads, of_weights))

        def added(totals, parts, span):
            return jax.tree.map(
                lambda total, x: tiles.add(total, x, span.start, 0), totals, parts
            )

        return of_maps, Given(
            added(of_given.queries, of_own.queries, block.rows),
            added(of_given.keys, of_own.keys, columns),
        )

    def tile_of(self, log_weights: tuple, block: _Block, columns, given: Given) -> Tile:
        """Returns the tile that has these log weights."""
        if not self.observation.side_by_side:
            (log_weights,) = log_weights
        rows = block.rows
        if self.first is not None:
            rows, columns = self.first.rows(rows), self.first.columns(columns)
        weights = jax.tree.map(jnp.exp, log_weights)
        return Tile(weights, log_weights, rows, columns, given)


def _walk(observation, maps, given, sizes, first, example, head) -> _Walk:
    num_queries, num_keys = maps[0].query.shape[-3], maps[0].key.shape[-3]
    queries, keys = range(num_queries), range(num_keys)
    if first is None:
        queries, keys = observation.part(num_queries, num_keys)
    if observation.side_by_side:
        heads = tuple(
            jax.vmap(lambda h, own=own: views.head_of(own, example, h))(
                jnp.arange(own.query.shape[-2])
            )
            for own in maps
        )
    else:
        heads = tuple(views.head_of(own, example, head) for own in maps)

    def own(x):
        x = tiles.at_batch(x, example)
        return x[:, 0] if x.shape[1] == 1 else x[:, head]

    return _Walk(
        observation,
        heads,
        jax.tree.map(own, given),
        sizes.fitted(len(queries), num_keys),
        first,
        queries,
        keys,
    )


def _normalizer(logsumexp: Array, is_new: Array | None) -> Array:
    """Returns the logsumexp, but very high where a query is to have no weights."""
    logsumexp = jnp.where(logsumexp == -jnp.inf, -views.HIDDEN, logsumexp)
    return logsumexp if is_new is None else jnp.where(is_new, logsumexp, -views.HIDDEN)


def _take(tree: Tree, span: tiles.Span) -> Tree:
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, span.start, span.size, 0), tree
    )


def _put(tree: Tree, new: Tree, span: tiles.Span) -> Tree:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, span.start, 0), tree, new
    )
