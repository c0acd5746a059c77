"""Methods of `AttentionMap` that read the whole map, as walks over its tiles.

A public function here implements the method of the same name. All statistics are
computed in one walk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mha_haiku.core import masks, tiles
from mha_haiku.core.attention import products
from mha_haiku.core.attention.factors import Factors
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.observation import (
    NO_ARRAYS,
    HeadSums,
    Observation,
    RowSum,
    SideArrays,
    Statistic,
    Sums,
    Tile,
    Top,
    Tree,
)
from mha_haiku.core.attention.statistics import LARGEST, STATISTICS, Statistics
from mha_haiku.core.attention.tiled import fold, sweep
from mha_haiku.core.attention.tiled.grid import Grid

_Result = TypeVar("_Result")
_Data = Array | np.ndarray


def _compiled(
    *static: str,
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Compiles a function of a map, and passes it tile sizes as `sizes=`."""

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        program = jax.jit(function, static_argnames=(*static, "sizes"))

        @functools.wraps(function)
        def call(factors: Factors, *arguments: Any, **options: Any) -> _Result:
            return program(factors, *arguments, sizes=_sizes(factors), **options)

        return call

    return decorate


def _sizes(factors: Factors) -> sweep.Sizes:
    # Narrower than for attention itself, so that fewer tiles lie on the diagonal; two
    # heads are then taken together, as one would have too little work.
    largest = 2**18 if math.prod(factors.shape[:-2]) > 1 else 2**19
    backend = jax.default_backend()
    return sweep.default_sizes(factors.shape, factors.weighting, backend, largest)


def with_counted_rows(
    factors: Factors, counted: _Data | None = None
) -> tuple[Factors, Array]:
    """Gives rows that do not count weights of 0, and marks the rows that count.

    A sum over queries would spread NaN to the results of other rows, as 0 x NaN is NaN.
    So rows of NaN, and rows that do not count (`counted`, `[B..., T]`; by default all
    that see a key count), get weights of 0 here. The returned counts `[B..., H, T]` are
    1 for a row that counts, else 0, and NaN for a row of NaN, where the caller must set
    results to NaN.
    """
    logsumexp = factors.logsumexp
    sees = factors.weighting.score.sees(logsumexp, factors.weighting)
    counts = jnp.where(jnp.isnan(logsumexp), jnp.nan, sees).astype(logsumexp.dtype)
    if counted is not None:
        counts = jnp.where(counted[..., None, :], counts, 0)
    has_weights = counts > 0
    query = factors.query
    if isinstance(factors.weighting.mask, masks.Full):
        # With other masks, NaN was already replaced by zeros.
        query = jnp.where(jnp.moveaxis(has_weights, -1, -2)[..., None], query, 0)
    factors = factors.with_log_sum(jnp.where(has_weights, logsumexp, -jnp.inf))
    return dataclasses.replace(factors, query=query), counts


def statistics(
    factors: Factors,
    *,
    pooled: tuple[int, int] | None,
    per_query: bool,
    counted: _Data | None,
    positions: _Data | None,
    tokens: _Data | None,
    key_tokens: _Data | None,
    largest_scores: Array | None,
) -> Statistics:
    """Computes all statistics."""
    *batch_shape, _, num_queries, num_keys = factors.shape
    if key_tokens is not None and tokens is None:
        raise ValueError("key_tokens needs tokens, the tokens of the queries.")
    key_tokens = tokens if key_tokens is None else key_tokens
    queries_shape, keys_shape = (*batch_shape, num_queries), (*batch_shape, num_keys)
    _check_fits("counted", counted, queries_shape, jnp.bool_)
    _check_fits("positions", positions, keys_shape, jnp.bool_)
    _check_fits("tokens", tokens, queries_shape, jnp.integer)
    _check_fits("key_tokens", key_tokens, keys_shape, jnp.integer)
    origin, ones = factors.weighting.origin, [1] * len(batch_shape)
    # As the columns of tiles, which count from the first key.
    position = origin.rows(tiles.Span(0, num_queries)).array() - origin.key
    first = jnp.broadcast_to(factors.weighting.mask.first_key(), batch_shape)
    at_keys = origin.columns(tiles.Span(0, num_keys)).array().reshape(*ones, -1)
    queries: dict[str, _Data] = {"position": position.reshape(*ones, -1)}
    keys: dict[str, _Data] = {"is_first": at_keys == first[..., None]}
    if positions is not None:
        keys["positions"] = positions
    if tokens is not None and key_tokens is not None:
        queries["tokens"] = tokens
        keys |= {"tokens": key_tokens, "preceding": jnp.roll(key_tokens, 1, -1)}
    arrays = SideArrays(queries, keys)
    return _statistics(
        factors,
        jax.tree.map(lambda x: jnp.asarray(x)[..., None], arrays),  # for all heads
        counted,
        largest_scores,
        registered=tuple(STATISTICS.values()),  # so that a new entry recompiles
        grid=None if pooled is None else Grid.of(factors.shape, *pooled),
        per_query=per_query,
    )


@dataclasses.dataclass(frozen=True)
class _Observed(Observation):
    """The row sums of entries, the mass that keys receive, and the cells of a grid."""

    sums: tuple[RowSum, ...]
    grid: Grid | None

    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        zeros = jnp.zeros(num_queries, dtype)
        return Sums(
            tuple(
                zeros if row_sum.size is None else (zeros,) * row_sum.size
                for row_sum in self.sums
            ),
            jnp.zeros(num_keys, dtype),
            () if self.grid is None else self.grid.zeros(dtype),
        )

    def add(self, tile: Tile, sums: Sums) -> Sums:
        # Without the barrier XLA on the CPU fuses the scores and their exponentials
        # into every sum, and computes them once per sum.
        tile = tile._replace(weights=lax.optimization_barrier(tile.weights))
        dtype = tile.weights.dtype
        # All sums that are linear in the weights are one matrix product.
        of_keys = dict.fromkeys(f for row_sum in self.sums for f in row_sum.of_keys)
        columns = [jnp.stack([f(tile).astype(dtype) for f in of_keys], 1)]
        if self.grid is not None:
            columns.append(self.grid.columns.membership(tile.columns, dtype))
        products = tile.weights @ jnp.concatenate(columns, 1)
        product_of = {f: products[:, i] for i, f in enumerate(of_keys)}
        parts = (
            row_sum.from_tile(tile, *(product_of[f] for f in row_sum.of_keys))
            for row_sum in self.sums
        )
        cells = sums.head
        if self.grid is not None:
            cells = self.grid.add(cells, products[:, len(of_keys) :], tile)
        # A sum, not a product with ones: the ones are shared by all heads, and where
        # two heads are taken together XLA would copy their tile to make it one product.
        received = tile.weights.sum(0)
        return Sums(self.merge(sums.queries, tuple(parts)), sums.keys + received, cells)

    def merge(self, first: Tree, second: Tree) -> Tree:
        return tuple(
            jax.tree.map(jnp.maximum if row_sum.is_largest else jnp.add, *pair)
            for row_sum, *pair in zip(self.sums, first, second, strict=True)
        )


@_compiled("registered", "grid", "per_query")
def _statistics(
    factors: Factors,
    arrays: SideArrays,
    counted: _Data | None,
    largest_scores: Array | None,
    *,
    registered: tuple[Statistic, ...],
    grid: Grid | None,
    per_query: bool,
    sizes: sweep.Sizes,
) -> Statistics:
    """Computes the statistics of a map; without a `grid` there is no pooled map."""
    num_queries, num_keys = factors.shape[-2:]
    factors, counts = with_counted_rows(factors, counted)
    has_weights, is_nan = counts > 0, jnp.isnan(counts)
    available = {None, *arrays.keys}
    if factors.weighting.score.is_kept or largest_scores is not None:
        available.add("scores")
    entries = [x for x in registered if x.from_head is None and x.needs in available]
    observed = tuple(dict.fromkeys(x for entry in entries for x in entry.sums))
    sums = fold.fold(_Observed(observed, grid), factors, arrays, sizes)
    count = jnp.maximum((counts != 0).sum(-1), 1)
    # Rows without weights may be NaN, which would spread to means and gradients. NaN of
    # counted rows is put back at the end, where it is not differentiated.
    rows = jax.tree.map(lambda x: jnp.where(has_weights, x, 0), sums.queries)
    received = jnp.where(is_nan.any(-1)[..., None], jnp.nan, sums.keys)
    row_sums = dict(zip(observed, rows, strict=True))
    row_sums[LARGEST] = _largest(row_sums[LARGEST][..., None], factors, sizes)[..., 0]
    if largest_scores is None:
        weight = row_sums[LARGEST]
        scores = jnp.log(jnp.where(weight > 0, weight, 1)) + factors.logsumexp
        largest_scores = jnp.where(weight > 0, scores, -jnp.inf)

    def finished(entry: Statistic) -> Array:
        parts = [row_sums[x] for x in entry.sums] or [largest_scores]
        by_query = entry.from_sums(*parts)
        by_query = jnp.where(has_weights, by_query, 0).astype(sums.keys.dtype)
        by_query = jnp.where(is_nan, jnp.nan, by_query)
        if per_query:
            return entry.from_mean(by_query)
        if entry.is_largest:
            seen = jnp.where(counts != 0, by_query, -jnp.inf)
            largest = seen.max(-1, initial=-jnp.inf)
            return jnp.where((counts != 0).any(-1), largest, 0)
        return entry.from_mean(by_query.sum(-1) / count)

    mask, origin = factors.weighting.mask, factors.weighting.origin
    unseen = mask.unseen_keys(num_queries, num_keys, origin.query, origin.key)
    head_sums = HeadSums(counts != 0, received, unseen)
    results = {
        entry.name: entry.from_head(head_sums)
        for entry in registered
        if entry.from_head is not None
    }
    results |= {entry.name: finished(entry) for entry in entries}
    pooled = None if grid is None else grid.rows.mean(sums.head, counts)
    return Statistics(results, received, pooled)


def _check_fits(name: str, array: _Data | None, shape: tuple[int, ...], kind: type):
    kinds = {jnp.bool_: "booleans", jnp.integer: "integers"}
    if array is None:
        return
    if array.shape != shape or not jnp.issubdtype(array.dtype, kind):
        raise ValueError(
            f"{name} must be {kinds[kind]} of shape {shape}, got {array.dtype} of "
            f"shape {array.shape}."
        )


@dataclasses.dataclass(frozen=True)
class _Pooled(Observation):
    grid: Grid

    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        return Sums(head=self.grid.zeros(dtype))

    def add(self, tile: Tile, sums: Sums) -> Sums:
        bins = self.grid.columns.membership(tile.columns, tile.weights.dtype)
        return sums._replace(head=self.grid.add(sums.head, tile.weights @ bins, tile))


def pooled(
    factors: Factors, rows: int, columns: int, queries: slice, keys: slice
) -> Array:
    """Computes the mean mass of each cell, `[B..., H, P, Q]`."""
    num_queries, num_keys = factors.shape[-2:]
    of_queries = _consecutive("queries", queries, num_queries)
    of_keys = _consecutive("keys", keys, num_keys)
    if (len(of_queries), len(of_keys)) != (num_queries, num_keys):
        # Any rectangle of a map is a map, as the logsumexp of a row is known.
        rows_of, columns_of = (slice(x.start, x.stop) for x in (of_queries, of_keys))
        first = tiles.Origin(of_queries.start, of_keys.start)
        factors = Factors(
            factors.query[..., rows_of, :, :],
            factors.key[..., columns_of, :, :],
            factors.weighting.moved(first),
            jax.tree.map(lambda x: x[..., rows_of], factors.log_sum),
            factors.fold and factors.fold.of_part(),
        )
    return _pooled(factors, grid=Grid.of(factors.shape, rows, columns))


@_compiled("grid")
def _pooled(factors: Factors, *, grid: Grid, sizes: sweep.Sizes) -> Array:
    factors, counts = with_counted_rows(factors)
    sums = fold.fold(_Pooled(grid), factors, NO_ARRAYS, sizes)
    return grid.rows.mean(sums.head, counts)


@dataclasses.dataclass(frozen=True)
class _Top(Observation):
    k: int

    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        shape = num_queries, self.k
        return Sums((jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, -1, jnp.int32)))

    def add(self, tile: Tile, sums: Sums) -> Sums:
        k = min(self.k, tile.columns.size)
        largest, keys = lax.top_k(tile.relative_scores, k)
        here = largest, (keys + tile.columns.start).astype(jnp.int32)
        return sums._replace(queries=self.merge(sums.queries, here))

    def merge(self, first: Tree, second: Tree) -> Tree:
        pairs = zip(first, second, strict=True)
        relative, keys = (jnp.concatenate(pair, -1) for pair in pairs)
        relative, order = lax.top_k(relative, self.k)
        return relative, jnp.take_along_axis(keys, order, -1)


@_compiled("k")
def top(factors: Factors, k: int, *, sizes: sweep.Sizes) -> Top:
    """Finds the k largest weights of each row; see `AttentionMap.top`."""
    factors, counts = with_counted_rows(factors)
    weights, keys = _top(lax.stop_gradient(factors), k, sizes)
    weights = _largest(weights, factors, sizes)
    return Top(jnp.where(jnp.isnan(counts)[..., None], jnp.nan, weights), keys)


@dataclasses.dataclass(frozen=True)
class _AtKeys(Observation):
    """The weights of each query at its keys `arrays.queries`, `[T, k]`; 0 for -1."""

    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        return Sums(jnp.zeros(arrays.queries.shape, dtype))

    def add(self, tile: Tile, sums: Sums) -> Sums:
        at = tile.arrays.queries - tile.columns.start
        is_here = (at >= 0) & (at < tile.columns.size)
        at = jnp.clip(at, 0, tile.columns.size - 1)
        here = jnp.where(is_here, jnp.take_along_axis(tile.weights, at, 1), 0)
        return sums._replace(queries=sums.queries + here)


def _top(factors: Factors, k: int, sizes: sweep.Sizes) -> tuple[Array, Array]:
    sums = fold.fold(_Top(k), factors, NO_ARRAYS, sizes)
    relative, keys = sums.queries
    score = factors.weighting.score
    is_hidden = score.log_weights(relative) < HIDDEN / 2
    return score.weights(relative), jnp.where(is_hidden, -1, keys)


def _largest(weights: Array, factors: Factors, sizes: sweep.Sizes) -> Array:
    """Gives the k largest weights `[B..., H, T, k]` a gradient."""

    def keys_of(factors: Factors) -> SideArrays:
        _, keys = _top(factors, weights.shape[-1], sizes)
        return SideArrays(jnp.swapaxes(keys, -2, -3))

    sums = fold.with_gradient(Sums(weights), _AtKeys(), factors, keys_of, sizes)
    return sums.queries


@dataclasses.dataclass(frozen=True)
class _Product(Observation):
    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        return Sums(jnp.zeros((num_queries, arrays.keys.shape[-1]), dtype))

    def add(self, tile: Tile, sums: Sums) -> Sums:
        return sums._replace(queries=sums.queries + tile.weights @ tile.arrays.keys)


@dataclasses.dataclass(frozen=True)
class _TransposedProduct(Observation):
    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
    ):
        size = arrays.queries.shape[-1]
        return Sums(keys=jnp.zeros((num_keys, size), dtype))

    def add(self, tile: Tile, sums: Sums) -> Sums:
        y = tile.arrays.queries[:, None]
        part = products.mix_transposed(tile.weights[None], y, 1)[:, 0]
        return sums._replace(keys=sums.keys + part)


@_compiled()
def apply(factors: Factors, x: Array, *, sizes: sweep.Sizes) -> Array:
    """Multiplies the map by `x`; see `AttentionMap.apply`."""
    x = _operand(factors.shape, x, axis=-1)
    arrays = SideArrays(keys=x.astype(factors.logsumexp.dtype))
    sums = fold.fold(_Product(), factors, arrays, sizes)
    return jnp.moveaxis(sums.queries, -3, -2)


@_compiled()
def apply_transposed(factors: Factors, y: Array, *, sizes: sweep.Sizes) -> Array:
    """Multiplies the transposed map by `y`; see `AttentionMap.apply_transposed`."""
    y = _operand(factors.shape, y, axis=-2)
    factors, counts = with_counted_rows(factors)
    arrays = SideArrays(queries=y.astype(counts.dtype))
    sums = fold.fold(_TransposedProduct(), factors, arrays, sizes)
    has_nan = jnp.isnan(counts).any(-1)[..., None, None]
    return jnp.moveaxis(jnp.where(has_nan, jnp.nan, sums.keys), -3, -2)


@_compiled("observation")
def observe(
    factors: Factors,
    observation: Observation,
    arrays: SideArrays,
    *,
    sizes: sweep.Sizes,
) -> Sums:
    """Runs an observation."""
    return fold.fold(observation, factors, arrays, sizes)


def _operand(map_shape: tuple[int, ...], x: Array, axis: int) -> Array:
    """Checks the array that multiplies a map along axis -1 (S) or -2 (T)."""
    x = jnp.asarray(x)
    *batch_shape, num_heads, _, _ = map_shape
    name = {-2: "T", -1: "S"}[axis]
    allowed = [(*batch_shape, map_shape[axis], heads) for heads in (num_heads, 1)]
    if x.shape[:-1] not in allowed:
        raise ValueError(
            f"the array must be [B..., {name}, H, V] or [B..., {name}, 1, V], "
            f"which is {allowed[0]} and V here; got shape {x.shape}."
        )
    return x


def _consecutive(name: str, part: slice, size: int) -> range:
    positions = range(size)[part]
    if not positions or positions.step != 1:
        raise ValueError(
            f"{name} must be a slice of consecutive positions in 0..{size}, at least "
            f"one; got {part}."
        )
    return positions
