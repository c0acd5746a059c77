"""The statistics of a map, all of them in one walk over its tiles.

`B...` batch axes, H heads, T query positions, R of them in a block; S key positions, C
of them in a tile; P bins of queries and Q bins of keys in a pooled map. What there is
to compute, the entries of `attention.statistics` say.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.observation import Given, Observation, Sums
from mha_haiku.core.attention.statistic import (
    HeadStatistic,
    HeadSums,
    RowSum,
    Statistic,
)
from mha_haiku.core.attention.statistics import LARGEST, Statistics
from mha_haiku.core.attention.tiled import fold_gradient, observations, sweep, views

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Observed(Observation):
    """The row sums of entries, what keys receive, and the cells of a grid."""

    sums: tuple[RowSum, ...]
    grid: observations.Grid | None

    def nothing(self, num_queries, num_keys, given, dtype):
        zeros = jnp.zeros(num_queries, dtype)
        return Sums(
            tuple(
                zeros if each.size is None else (zeros,) * each.size
                for each in self.sums
            ),
            jnp.zeros(num_keys, dtype),
            () if self.grid is None else self.grid.zeros(dtype),
        )

    def add(self, tile, sums):
        # Without the barrier XLA fuses the scores and their exponentials into each of
        # the sums on the CPU, and computes them once per sum.
        tile = tile._replace(weights=lax.optimization_barrier(tile.weights))
        dtype = tile.weights.dtype
        wanted = {column: None for each in self.sums for column in each.of_keys}
        columns = [jnp.stack([f(tile).astype(dtype) for f in wanted], 1)]
        if self.grid is not None:
            columns.append(self.grid.columns.membership(tile.columns, dtype))
        products = tile.weights @ jnp.concatenate(columns, 1)
        product_of = {f: products[:, i] for i, f in enumerate(wanted)}
        parts = (
            each.from_tile(tile, *(product_of[f] for f in each.of_keys))
            for each in self.sums
        )
        cells = sums.head
        if self.grid is not None:
            cells = self.grid.add(cells, products[:, len(wanted) :], tile)
        # A sum, and no product with ones: that is the same for all heads, and where two
        # heads are taken together XLA would copy their tile to make it one product.
        received = tile.weights.sum(0)
        return Sums(self.merge(sums.queries, tuple(parts)), sums.keys + received, cells)

    def merge(self, first, second):
        return tuple(
            jax.tree.map(jnp.maximum if each.is_largest else jnp.add, *pair)
            for each, *pair in zip(self.sums, first, second, strict=True)
        )


@functools.partial(
    jax.jit, static_argnames=("registered", "grid", "per_query", "sizes", "mesh")
)
def statistics(
    factors: views.Factors,
    given: Given,
    counted: Array | None,
    *,
    registered: tuple[Statistic | HeadStatistic, ...],
    grid: observations.Grid | None,
    per_query: bool,
    sizes: sweep.Sizes,
    mesh: jax.sharding.Mesh | None,
) -> Statistics:
    """Computes the statistics of a map.

    `given` is what `given_of` returns; without a `grid` there is no pooled map. The
    entries of `STATISTICS` are an argument, so that another one compiles anew.
    """
    num_queries, num_keys = factors.query.shape[-3], factors.key.shape[-3]
    factors, counts = views.counting(factors, counted)
    has_weights, is_nan = counts > 0, jnp.isnan(counts)
    entries = [
        entry
        for entry in registered
        if isinstance(entry, Statistic)
        and (entry.needs is None or entry.needs in given.keys)
    ]
    wanted = tuple(dict.fromkeys(each for entry in entries for each in entry.sums))
    sums = fold_gradient.fold(_Observed(wanted, grid), (factors,), given, sizes, mesh)
    count = jnp.maximum((counts != 0).sum(-1), 1)
    # Rows without weights may be NaN, which would spread to means and gradients. NaN of
    # rows that count is put back last, where nothing differentiates it.
    rows = jax.tree.map(lambda x: jnp.where(has_weights, x, 0), sums.queries)
    received = jnp.where(is_nan.any(-1)[..., None], jnp.nan, sums.keys)
    row_sums = dict(zip(wanted, rows, strict=True))
    row_sums[LARGEST] = observations.largest(
        row_sums[LARGEST], factors, sizes=sizes, mesh=mesh
    )

    def finished(entry):
        each_query = entry.from_sums(*(row_sums[each] for each in entry.sums))
        each_query = jnp.where(has_weights, each_query, 0).astype(sums.keys.dtype)
        each_query = jnp.where(is_nan, jnp.nan, each_query)
        return entry.from_mean(each_query if per_query else each_query.sum(-1) / count)

    mask, origin = factors.weighting.mask, factors.weighting.origin
    unseen = mask.unseen_keys(num_queries, num_keys, origin.query)
    head_sums = HeadSums(counts != 0, received, unseen)
    results = {
        entry.name: entry.from_sums(head_sums)
        for entry in registered
        if isinstance(entry, HeadStatistic)
    }
    results |= {entry.name: finished(entry) for entry in entries}
    pooled = None if grid is None else grid.rows.mean(sums.head, counts)
    return Statistics(results, received, pooled)


def given_of(
    map_shape: tuple[int, ...],
    *,
    origin: tiles.Origin,
    counted: Array | None,
    positions: Array | None,
    tokens: Array | None,
    key_tokens: Array | None,
) -> Given:
    """Returns what entries may need; see `AttentionMap.statistics`.

    Raises:
      ValueError: If an array does not fit the map (B..., H, T, S).
    """
    *batch_shape, _, num_queries, num_keys = map_shape
    if key_tokens is not None and tokens is None:
        raise ValueError("key_tokens needs tokens, the tokens of the queries.")
    key_tokens = tokens if key_tokens is None else key_tokens
    queries_shape, keys_shape = (*batch_shape, num_queries), (*batch_shape, num_keys)
    _check_fits("counted", counted, queries_shape, bool)
    _check_fits("positions", positions, keys_shape, bool)
    _check_fits("tokens", tokens, queries_shape, jnp.integer)
    _check_fits("key_tokens", key_tokens, keys_shape, jnp.integer)
    position = origin.rows(tiles.Span(0, num_queries)).array()
    queries = {"position": position.reshape(*[1] * len(batch_shape), -1)}
    keys = {}
    if positions is not None:
        keys["positions"] = positions
    if tokens is not None:
        queries["tokens"] = tokens
        keys |= {"tokens": key_tokens, "preceding": jnp.roll(key_tokens, 1, -1)}
    # Alike in all heads.
    return jax.tree.map(lambda x: jnp.asarray(x)[..., None], Given(queries, keys))


def _check_fits(name, array, shape, kind):
    if array is None:
        return
    kinds = {bool: "booleans", jnp.integer: "integers"}
    is_kind = array.dtype == bool if kind is bool else jnp.issubdtype(array.dtype, kind)
    if array.shape != shape or not is_kind:
        raise ValueError(
            f"{name} must be {kinds[kind]} of shape {shape}, got {array.dtype} of "
            f"shape {array.shape}."
        )
