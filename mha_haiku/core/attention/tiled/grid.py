"""The cells of a pooled map: equal bins of its queries and of its keys."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention.observation import Tile


class Bins(NamedTuple):
    """Equal bins of positions."""

    size: int  # the number of positions
    width: int  # positions in a bin; the last bin may have fewer

    @classmethod
    def of(cls, size: int, most: int) -> "Bins":
        return cls(size, int(bin_edges(size, most)[1]))

    @property
    def count(self) -> int:
        return -(-self.size // self.width)

    def touched(self, size: int) -> int:
        """Returns the largest number of bins that a span of this size can touch."""
        return min(self.count, (size - 1) // self.width + 2)

    def first(self, span: tiles.Span) -> Array:
        first = span.start // self.width
        return jnp.clip(first, 0, self.count - self.touched(span.size))

    def membership(self, span: tiles.Span, dtype: jnp.dtype) -> Array:
        """Marks which positions are in which touched bins, `[size, bins]`."""
        bins = self.first(span) + jnp.arange(self.touched(span.size))[None, :]
        return (span.array()[:, None] // self.width == bins).astype(dtype)

    def mean(self, total: Array, counts: Array) -> Array:
        """Averages sums `[..., bins, n]` over the positions that count."""
        beyond = self.count * self.width - self.size
        counted = jnp.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(0, beyond)])
        counted = counted.reshape(*counted.shape[:-1], self.count, self.width)
        per_bin = jnp.maximum(jnp.nansum(counted, -1), 1)[..., None]
        is_nan = jnp.isnan(counted).any(-1)[..., None]
        return jnp.where(is_nan, jnp.nan, total / per_bin)


class Grid(NamedTuple):
    """The cells of a pooled map."""

    rows: Bins
    columns: Bins

    @classmethod
    def of(cls, map_shape: tuple[int, ...], rows: int, columns: int) -> "Grid":
        checks.positive_integer("rows", rows)
        checks.positive_integer("columns", columns)
        return cls(*map(Bins.of, map_shape[-2:], (rows, columns)))

    def zeros(self, dtype: jnp.dtype) -> Array:
        return jnp.zeros((self.rows.count, self.columns.count), dtype)

    def add(self, cells: Array, mass: Array, tile: Tile) -> Array:
        """Adds a tile's mass `[R, q]` on the touched bins to cells `[P, Q]`."""
        part = self.rows.membership(tile.rows, mass.dtype).T @ mass
        at = self.rows.first(tile.rows), self.columns.first(tile.columns)
        at = tiles.starts(at)
        part += lax.dynamic_slice(cells, at, part.shape)
        return lax.dynamic_update_slice(cells, part, at)


def bin_edges(size: int, bins: int) -> np.ndarray:
    """Returns the edges of at most `bins` equal bins; the last may be smaller.

    They are integers from 0 to `size`; bin i covers `edges[i]:edges[i + 1]`.

    Example:
      >>> mh.attention.bin_edges(10, 4)
      array([ 0,  3,  6,  9, 10])
    """
    checks.positive_integer("the number of positions", size)
    checks.positive_integer("the number of bins", bins)
    width = math.ceil(size / bins)
    return np.minimum(np.arange(math.ceil(size / width) + 1) * width, size)
