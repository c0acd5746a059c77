"""What a map can be asked besides statistics: pooled, top, products, divergence.

Each is an observation, which `fold` runs, and a function that finishes its sums.
"""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention import products
from mha_haiku.core.attention.inputs import HIDDEN
from mha_haiku.core.attention.observation import (
    NOTHING_GIVEN,
    Given,
    Observation,
    Sums,
    Tile,
    Top,
)
from mha_haiku.core.attention.tiled import fold_gradient, sweep, views

Array = jax.Array
Mesh = jax.sharding.Mesh | None


class Bins(NamedTuple):
    """Equal bins of a range of positions."""

    start: int  # the first position
    stop: int  # the position after the last
    width: int  # positions in a bin; the last bin may have fewer

    @classmethod
    def of(cls, positions: range, most: int) -> "Bins":
        edges = bin_edges(len(positions), most)
        return cls(positions.start, positions.stop, int(edges[1]))

    @property
    def count(self) -> int:
        return -(-(self.stop - self.start) // self.width)

    def touched(self, size: int) -> int:
        """Counts the bins that a span of this size may touch at most."""
        return min(self.count, (size - 1) // self.width + 2)

    def first(self, span: tiles.Span) -> Array:
        first = (span.start - self.start) // self.width
        return jnp.clip(first, 0, self.count - self.touched(span.size))

    def membership(self, span: tiles.Span, dtype) -> Array:
        """Marks which positions are in which touched bins, `[size, bins]`."""
        position = span.array()[:, None]
        bins = self.first(span) + jnp.arange(self.touched(span.size))[None, :]
        inside = (position >= self.start) & (position < self.stop)
        return (inside & ((position - self.start) // self.width == bins)).astype(dtype)

    def mean(self, total: Array, counts: Array) -> Array:
        """Averages sums `[..., bins, n]` over the positions that count."""
        size = self.stop - self.start
        counted = tiles.take(counts, tiles.Span(self.start, size), -1)
        fill = [(0, 0)] * (counts.ndim - 1) + [(0, self.count * self.width - size)]
        counted = jnp.pad(counted, fill)
        counted = counted.reshape(*counted.shape[:-1], self.count, self.width)
        per_bin = jnp.maximum(jnp.nansum(counted, -1), 1)[..., None]
        is_nan = jnp.isnan(counted).any(-1)[..., None]
        return jnp.where(is_nan, jnp.nan, total / per_bin)


class Grid(NamedTuple):
    """The cells of a pooled map."""

    rows: Bins
    columns: Bins

    @classmethod
    def of(
        cls,
        map_shape: tuple[int, ...],
        rows: int,
        columns: int,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> "Grid":
        checks.positive_integer("rows", rows)
        checks.positive_integer("columns", columns)
        num_queries, num_keys = map_shape[-2:]
        queries = _consecutive("queries", queries, num_queries)
        keys = _consecutive("keys", keys, num_keys)
        return cls(Bins.of(queries, rows), Bins.of(keys, columns))

    def zeros(self, dtype: jnp.dtype) -> Array:
        return jnp.zeros((self.rows.count, self.columns.count), dtype)

    def add(self, cells: Array, mass: Array, tile: Tile) -> Array:
        """Adds a tile's mass `[R, q]` on the touched bins to cells `[P, Q]`."""
        part = self.rows.membership(tile.rows, mass.dtype).T @ mass
        at = self.rows.first(tile.rows), self.columns.first(tile.columns)
        part += lax.dynamic_slice(cells, at, part.shape)
        return lax.dynamic_update_slice(cells, part, at)


def bin_edges(size: int, bins: int) -> np.ndarray:
    """Finds edges of at most `bins` equal bins of positions; the last may differ.

    They are integers from 0 to `size`; bin i covers `edges[i]:edges[i + 1]`.
    """
    checks.positive_integer("the number of positions", size)
    checks.positive_integer("the number of bins", bins)
    width = math.ceil(size / bins)
    return np.minimum(np.arange(math.ceil(size / width) + 1) * width, size)


@dataclasses.dataclass(frozen=True)
class _Pooled(Observation):
    grid: Grid

    def part(self, num_queries, num_keys):
        return tuple(range(bins.start, bins.stop) for bins in self.grid)

    def nothing(self, num_queries, num_keys, given, dtype):
        return Sums(head=self.grid.zeros(dtype))

    def add(self, tile, sums):
        bins = self.grid.columns.membership(tile.columns, tile.weights.dtype)
        return sums._replace(head=self.grid.add(sums.head, tile.weights @ bins, tile))


@functools.partial(jax.jit, static_argnames=("grid", "sizes", "mesh"))
def pooled(
    factors: views.Factors, *, grid: Grid, sizes: sweep.Sizes, mesh: Mesh
) -> Array:
    """Computes the mean mass of each cell, `[B..., H, P, Q]`."""
    factors, counts = views.counting(factors)
    sums = fold_gradient.fold(_Pooled(grid), (factors,), NOTHING_GIVEN, sizes, mesh)
    return grid.rows.mean(sums.head, counts)


@dataclasses.dataclass(frozen=True)
class _Top(Observation):
    k: int

    def nothing(self, num_queries, num_keys, given, dtype):
        shape = num_queries, self.k
        lowest = jnp.full(shape, 2 * HIDDEN, dtype)  # below all that is masked
        return Sums((lowest, jnp.full(shape, -1, jnp.int32)))

    def add(self, tile, sums):
        k = min(self.k, tile.columns.size)
        largest, keys = lax.top_k(tile.log_weights, k)
        here = largest, (keys + tile.columns.start).astype(jnp.int32)
        return sums._replace(queries=self.merge(sums.queries, here))

    def merge(self, first, second):
        pairs = zip(first, second, strict=True)
        log_weights, keys = (jnp.concatenate(pair, -1) for pair in pairs)
        log_weights, chosen = lax.top_k(log_weights, self.k)
        return log_weights, jnp.take_along_axis(keys, chosen, -1)


@functools.partial(jax.jit, static_argnames=("k", "sizes", "mesh"))
def top(factors: views.Factors, *, k: int, sizes: sweep.Sizes, mesh: Mesh) -> Top:
    """Finds the k largest weights of each row; see `AttentionMap.top`."""
    factors, counts = views.counting(factors)
    frozen = lax.stop_gradient(factors)
    sums = fold_gradient.fold(_Top(k), (frozen,), NOTHING_GIVEN, sizes, mesh)
    log_weights, keys = sums.queries
    keys = jnp.where(log_weights > HIDDEN / 2, keys, -1)
    at_keys = Given(jnp.swapaxes(keys, -2, -3))
    weights = Sums(jnp.exp(log_weights))
    weights = fold_gradient.known(
        weights, _AtKeys(), (factors,), at_keys, sizes
    ).queries
    return Top(jnp.where(jnp.isnan(counts)[..., None], jnp.nan, weights), keys)


@dataclasses.dataclass(frozen=True)
class _AtKeys(Observation):
    """The weights at the keys that are given of each query, `[T, k]`; 0 for -1."""

    def nothing(self, num_queries, num_keys, given, dtype):
        return Sums(jnp.zeros(given.queries.shape, dtype))

    def add(self, tile, sums):
        at = tile.given.queries - tile.columns.start
        is_here = (at >= 0) & (at < tile.columns.size)
        at = jnp.clip(at, 0, tile.columns.size - 1)
        here = jnp.where(is_here, jnp.take_along_axis(tile.weights, at, 1), 0)
        return sums._replace(queries=sums.queries + here)


def largest(
    weights: Array, factors: views.Factors, *, sizes: sweep.Sizes, mesh: Mesh
) -> Array:
    """Gives the known largest weights `[B..., H, T]` a gradient."""

    def positions(maps):
        sums = fold_gradient.fold(_Top(1), maps, NOTHING_GIVEN, sizes, mesh)
        return Given(jnp.swapaxes(sums.queries[1], -2, -3))

    sums = Sums(weights[..., None])
    sums = fold_gradient.known(sums, _AtKeys(), (factors,), positions, sizes)
    return sums.queries[..., 0]


@dataclasses.dataclass(frozen=True)
class _Product(Observation):
    def nothing(self, num_queries, num_keys, given, dtype):
        return Sums(jnp.zeros((num_queries, given.keys.shape[-1]), dtype))

    def add(self, tile, sums):
        return sums._replace(queries=sums.queries + tile.weights @ tile.given.keys)


@dataclasses.dataclass(frozen=True)
class _TransposedProduct(Observation):
    def nothing(self, num_queries, num_keys, given, dtype):
        size = given.queries.shape[-1]
        return Sums(keys=jnp.zeros((num_keys, size), dtype))

    def add(self, tile, sums):
        y = tile.given.queries[:, None]
        part = products.gather(tile.weights[None], y, 1)[:, 0]
        return sums._replace(keys=sums.keys + part)


@functools.partial(jax.jit, static_argnames=("sizes", "mesh"))
def apply(factors: views.Factors, x: Array, *, sizes: sweep.Sizes, mesh: Mesh) -> Array:
    """Multiplies the map by `x`; see `AttentionMap.apply`."""
    given = Given(keys=x.astype(factors.logsumexp.dtype))
    sums = fold_gradient.fold(_Product(), (factors,), given, sizes, mesh)
    return jnp.moveaxis(sums.queries, -3, -2)


@functools.partial(jax.jit, static_argnames=("sizes", "mesh"))
def apply_transposed(
    factors: views.Factors, y: Array, *, sizes: sweep.Sizes, mesh: Mesh
) -> Array:
    """Multiplies the transposed map by `y`; see `AttentionMap.apply_transposed`."""
    factors, counts = views.counting(factors)
    given = Given(queries=y.astype(counts.dtype))
    sums = fold_gradient.fold(_TransposedProduct(), (factors,), given, sizes, mesh)
    has_nan = jnp.isnan(counts).any(-1)[..., None, None]
    return jnp.moveaxis(jnp.where(has_nan, jnp.nan, sums.keys), -3, -2)


def factor(map_shape: tuple[int, ...], x: Array, axis: int) -> Array:
    """Checks what a map is to be multiplied by along its axis -1 (S) or -2 (T)."""
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


@dataclasses.dataclass(frozen=True)
class _Divergence(Observation):
    """The Jensen-Shannon divergences of all pairs of heads, summed over queries.

    The divergence of two rows: the entropy of their mean less their mean entropy.
    """

    side_by_side: ClassVar[bool] = True

    def nothing(self, num_queries, num_keys, given, dtype):
        shape = (given.queries[0].shape[-1], given.queries[-1].shape[-1])
        return Sums(head=jnp.zeros(shape, dtype))

    def add(self, tile, sums):
        logs, other_logs = tile.log_weights[0], tile.log_weights[-1]
        weights, others = tile.weights[0], tile.weights[-1]
        # `[R, H]` and `[R, H']`: 1 for queries that see any key, else 0.
        sees, others_see = tile.given.queries[0], tile.given.queries[-1]

        def entropies_of_means(head):
            mean = (head[None] + others) / 2
            return -(mean * jnp.log(jnp.where(mean > 0, mean, 1))).sum(-1)

        both = (weights * logs).sum(-1)[:, None] + (others * other_logs).sum(-1)[None]
        divergences = lax.map(entropies_of_means, weights) + both / 2
        counts = sees.T[:, None] * others_see.T[None]
        return sums._replace(head=sums.head + (counts * divergences).sum(-1))


@functools.partial(jax.jit, static_argnames=("sizes", "mesh"))
def divergence(
    factors: views.Factors,
    other: views.Factors | None,
    *,
    sizes: sweep.Sizes,
    mesh: Mesh,
) -> Array:
    """Computes mean Jensen-Shannon divergences; see `AttentionMap.divergence`."""
    maps = (factors,) if other is None else (factors, other)
    maps, counts = zip(*map(views.counting, maps), strict=True)
    weighs = [(x > 0).astype(x.dtype) for x in counts]
    sees = [(x != 0).astype(x.dtype) for x in counts]  # also what is NaN
    # [B..., T, 1, H]: each head is given the arrays of all heads.
    all_weigh = [jnp.swapaxes(x, -1, -2)[..., None, :] for x in weighs]
    sums = fold_gradient.fold(_Divergence(), maps, Given(tuple(all_weigh)), sizes, mesh)
    in_both = functools.partial(jnp.einsum, "...ht,...gt->...hg")
    count = in_both(weighs[0], weighs[-1])
    has_nan = in_both(sees[0], sees[-1]) > count
    mean = jnp.maximum(sums.head, 0) / jnp.maximum(count, 1)
    return jnp.where(has_nan, jnp.nan, mean)


def _consecutive(name: str, part: slice, size: int) -> range:
    positions = range(size)[part]
    if not positions or positions.step != 1:
        raise ValueError(
            f"{name} must be a slice of consecutive positions in 0..{size}, at least "
            f"one; got {part}."
        )
    return positions
