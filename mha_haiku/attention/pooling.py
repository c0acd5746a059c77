"""Attention maps at a coarse grain: the mass of each cell of a grid.

T query positions, S key positions; P bins of queries, Q bins of keys.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import checks, tiles
from mha_haiku.attention import sweep, views

Array = jax.Array


def bin_edges(size: int, bins: int) -> np.ndarray:
    """Returns the edges of at most `bins` equal bins of positions; the last may differ.

    Args:
      size: The number of positions, at least 1.
      bins: The largest number of bins, at least 1.

    Returns:
      `[bins + 1]` integers from 0 to `size`; bin i covers `edges[i]:edges[i + 1]`.
    """
    checks.positive_integer("the number of positions", size)
    checks.positive_integer("the number of bins", bins)
    width = math.ceil(size / bins)
    return np.minimum(np.arange(math.ceil(size / width) + 1) * width, size)


class Bins(NamedTuple):
    """Equal bins of a range of positions.

    Attributes:
      start: The first position.
      stop: The position after the last.
      width: Positions in a bin; the last bin may have fewer.
    """

    start: int
    stop: int
    width: int

    @classmethod
    def of(cls, positions: range, most: int) -> "Bins":
        """Returns at most `most` bins of consecutive positions."""
        edges = bin_edges(len(positions), most)
        return cls(positions.start, positions.stop, int(edges[1]))

    @property
    def count(self) -> int:
        """The number of bins."""
        return -(-(self.stop - self.start) // self.width)

    def first(self, span: tiles.Span) -> Array:
        """Returns the bin in which a span begins; below 0 if before all bins."""
        return (span.start - self.start) // self.width

    def touched(self, size: int) -> int:
        """Returns how many bins a span of a size may touch at most."""
        return min(self.count, (size - 1) // self.width + 2)

    def membership(self, span: tiles.Span, dtype) -> Array:
        """Returns which positions are in which of the touched bins, `[size, bins]`."""
        position = span.array()[:, None]
        bins = self._origin(span) + jnp.arange(self.touched(span.size))[None, :]
        inside = (position >= self.start) & (position < self.stop)
        return (inside & ((position - self.start) // self.width == bins)).astype(dtype)

    def add(self, total: Array, part: Array, span: tiles.Span, axis: int) -> Array:
        """Returns `total`, whose axis is all bins, plus `part` of the touched ones."""
        return tiles.add(total, part, self._origin(span), axis)

    def mean(self, total: Array, counts: Array) -> Array:
        """Returns `total [..., bins, n]` per position that counts, `[..., size]`."""
        every = tiles.Span(self.start, self.stop - self.start)
        counted = tiles.take(counts, every, -1).astype(total.dtype)
        fill = [(0, 0)] * (counts.ndim - 1) + [
            (0, self.count * self.width - every.size)
        ]
        counted = jnp.pad(counted, fill)
        per_bin = counted.reshape(*counted.shape[:-1], self.count, self.width).sum(-1)
        return total / jnp.maximum(per_bin, 1)[..., None]

    def _origin(self, span):
        most = self.count - self.touched(span.size)
        return jnp.clip(self.first(span), 0, most)


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
        """Returns the cells of parts of a map; see `AttentionMap.pooled`.

        Raises:
          ValueError: If a part is empty or has steps, or a number of bins is below 1.
        """
        checks.positive_integer("rows", rows)
        checks.positive_integer("columns", columns)
        num_queries, num_keys = map_shape[-2:]
        queries = _consecutive("queries", queries, num_queries)
        keys = _consecutive("keys", keys, num_keys)
        return cls(Bins.of(queries, rows), Bins.of(keys, columns))


@functools.partial(jax.jit, static_argnames=("grid", "sizes"))
def pooled(attention_map: Any, *, grid: Grid, sizes: sweep.Sizes) -> Array:
    """Returns the mass of each cell, `[B..., H, P, Q]`; see `AttentionMap.pooled`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    sizes = sizes.fitted(grid.rows.stop - grid.rows.start, num_keys)
    dtype = attention_map.dtype

    def of_head(example, head):
        view = views.head_of(attention_map, example, head)
        counts = view.logsumexp > -jnp.inf

        def of_rows(rows, fresh_from, total):
            rows, fresh_from = rows + grid.rows.start, fresh_from + grid.rows.start

            def of_tile(columns, seen_from, mass):
                weights = view.weights(rows, columns, seen_from)
                bins = grid.columns.membership(columns, dtype)
                return grid.columns.add(mass, weights @ bins, columns, 1)

            mass = sweep.over_keys(
                of_tile,
                jnp.zeros((rows.size, grid.columns.count), dtype),
                view.mask,
                rows,
                num_keys,
                sizes.columns,
                (grid.columns.start, grid.columns.stop),
            )
            fresh = tiles.take(counts, rows, 0) & (rows.array() >= fresh_from)
            bins = grid.rows.membership(rows, dtype) * fresh[:, None].astype(dtype)
            return grid.rows.add(total, bins.T @ mass, rows, 0)

        total = jnp.zeros((grid.rows.count, grid.columns.count), dtype)
        size = grid.rows.stop - grid.rows.start
        total = sweep.over_rows(of_rows, total, size, sizes.rows)
        return grid.rows.mean(total, counts)

    return sweep.over_heads(of_head, batch_shape, num_heads, sizes.heads)


def _consecutive(name: str, part: slice, size: int) -> range:
    """Returns the positions that a slice names, which must be one after the other."""
    positions = range(size)[part]
    if not positions or positions.step != 1:
        raise ValueError(
            f"{name} must be a slice of consecutive positions in 0..{size}, at least "
            f"one; got {part}."
        )
    return positions
