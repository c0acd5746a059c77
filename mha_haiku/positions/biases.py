"""Score biases that tell how far apart a query and a key stand: ALiBi, T5, arrays.

`B...` batch axes, T query positions, S key positions, H heads. A score bias is lazy
like a mask: it gives tiles of itself, `[B..., H, R, C]`, to be added to the scores of R
queries and C keys.
"""

import abc
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku import checks, tiles

Array = jax.Array


def alibi(num_heads: int) -> "ScoreBias":
    """Returns the bias `-slope_h |t - s|`, its slopes a geometric series over heads.

    Source: Press et al. 2022, section 3, https://arxiv.org/abs/2108.12409; numbers of
    heads that are no power of two as in the authors' code.
    """
    checks.positive_integer("num_heads", num_heads)
    largest_power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / largest_power) for i in range(largest_power)]
    between = [2 ** (-4 * (2 * i + 1) / largest_power) for i in range(largest_power)]
    slopes = slopes + between[: num_heads - largest_power]
    return Alibi(np.asarray(slopes), 0)


def relative_bias(
    table: Array, *, bidirectional: bool, max_distance: int = 128
) -> "ScoreBias":
    """Returns a learned bias per head and bucket of the distance.

    Args:
      table: `[buckets, H]`. Half of a direction's buckets stand for one distance each;
        the others for ranges that grow geometrically up to `max_distance`.
      bidirectional: Whether keys after the query have buckets of their own; if not,
        they share bucket 0 (for causal masks).
      max_distance: Distances from here on share the last bucket, in positions.

    Raises:
      ValueError: If the table is not `[buckets, H]`, has fewer than two buckets for a
        direction, or `max_distance` is below the distances with a bucket of their own.

    Source: Raffel et al. 2020 (T5), section 2.1, https://arxiv.org/abs/1910.10683.
    """
    table = jnp.asarray(table)
    if table.ndim != 2:
        raise ValueError(f"table must be [buckets, H], got shape {table.shape}.")
    num_exact = table.shape[0] // (4 if bidirectional else 2)
    if not num_exact:
        raise ValueError(
            f"table needs at least {4 if bidirectional else 2} buckets where "
            f"bidirectional is {bidirectional}, got {table.shape[0]}."
        )
    checks.integer_in("max_distance", max_distance, num_exact + 1, None)
    return RelativeBias(table.T, bidirectional, max_distance, 0)


def as_bias(value: "ScoreBias | Array | None") -> "ScoreBias | None":
    """Returns a score bias from one, from None or from an array.

    Args:
      value: An array is float `[B..., T, S]` or `[B..., H, T, S]`; an axis may have
        size 1. Its rank alone decides which of the two it is.
    """
    if value is None or isinstance(value, ScoreBias):
        return value
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"bias must be of floats, got {value.dtype}; what may be attended to goes "
            "in mask=."
        )
    return DenseBias(value)


class ScoreBias(abc.ABC):
    """What is added to the scores; a pytree."""

    @abc.abstractmethod
    def aligned_tile(self, rows: Array, columns: Array, batch_ndim: int) -> Array:
        """Returns the bias at positions `rows` x `columns` as `[B..., H, R, C]`."""

    @abc.abstractmethod
    def check(
        self, batch_shape: tuple, num_heads: int, num_queries: int, num_keys: int
    ):
        """Raises ValueError where the bias does not fit attention of these sizes."""

    def aligned(self, batch_ndim: int) -> "ScoreBias":
        """Returns the bias with its arrays' axes standing beside `[B..., H, T, S]`.

        They are `[B..., H, ...]` then, where an axis of size 1 stands for any, so that
        a bias inside a stack of attention maps keeps its meaning.
        """
        del batch_ndim
        return self

    def add_gradient(
        self, total: "ScoreBias", cotangent: Array, rows: Array, columns: Array
    ) -> "ScoreBias":
        """Returns `total` plus the gradient that a tile's cotangent gives.

        Args:
          total: A bias like this one, aligned, of gradients.
          cotangent: `[B..., H, R, C]`.
          rows: R positions.
          columns: C positions.
        """

        def tile(bias):
            of_bias = bias.aligned_tile(rows, columns, cotangent.ndim - 3)
            return jnp.broadcast_to(of_bias.astype(cotangent.dtype), cotangent.shape)

        _, pullback = jax.vjp(tile, self)
        return jax.tree.map(jnp.add, total, *pullback(cotangent))


@tiles.pytree(data=("slopes",), meta=("offset",))
class Alibi(ScoreBias):
    """`-slope_h |t + offset - s|`; slopes `[H]` or `[B..., H]`."""

    slopes: Array
    offset: int

    def shifted(self, offset: int) -> "Alibi":
        """Returns the bias in which query t stands at position t + `offset`."""
        return Alibi(self.slopes, self.offset + offset)

    def check(self, batch_shape, num_heads, num_queries, num_keys):
        if self.slopes.shape[-1] != num_heads:
            raise ValueError(
                f"the ALiBi bias is of {self.slopes.shape[-1]} heads, "
                f"attention of {num_heads}."
            )

    def aligned(self, batch_ndim):
        if self.slopes.ndim == batch_ndim + 1:
            return self
        return Alibi(_stood_beside(self.slopes, batch_ndim + 1), self.offset)

    def aligned_tile(self, rows, columns, batch_ndim):
        rows = tiles.on_rows(rows, batch_ndim) + self.offset
        distance = jnp.abs(rows - tiles.on_columns(columns, batch_ndim))
        slopes = jnp.asarray(self.aligned(batch_ndim).slopes)[..., None, None]
        return -slopes * distance.astype(slopes.dtype)


@tiles.pytree(data=("table",), meta=("bidirectional", "max_distance", "offset"))
class RelativeBias(ScoreBias):
    """A bias per bucket of the distance; the table is `[H, buckets]`."""

    table: Array
    bidirectional: bool
    max_distance: int
    offset: int

    def shifted(self, offset: int) -> "RelativeBias":
        """Returns the bias in which query t stands at position t + `offset`."""
        return self._replace_table(self.table, self.offset + offset)

    def check(self, batch_shape, num_heads, num_queries, num_keys):
        if self.table.shape[-2] != num_heads:
            raise ValueError(
                f"the relative bias is of {self.table.shape[-2]} heads, attention of "
                f"{num_heads}."
            )

    def aligned(self, batch_ndim):
        if self.table.ndim == batch_ndim + 2:
            return self
        return self._replace_table(
            _stood_beside(self.table, batch_ndim + 2), self.offset
        )

    def aligned_tile(self, rows, columns, batch_ndim):
        table = self.aligned(batch_ndim).table
        if isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span):
            return self._contiguous_tile(table, rows, columns)
        rows, columns = tiles.as_array(rows), tiles.as_array(columns)
        distance = columns[None, :] - rows[:, None]
        return jnp.take(table, self.buckets(distance - self.offset), axis=-1)

    def _contiguous_tile(self, table, rows, columns):
        """Returns a tile by few lookups of buckets, one per diagonal."""
        values = jnp.take(table, self._diagonal_buckets(rows, columns), axis=-1)
        diagonal = jnp.arange(columns.size)[None] - jnp.arange(rows.size)[:, None]
        return jnp.take(values, diagonal + rows.size - 1, axis=-1, mode="clip")

    def add_gradient(self, total, cotangent, rows, columns):
        if not (isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span)):
            return super().add_gradient(total, cotangent, rows, columns)
        # In rows that are one shorter each stands one to the right of the one before;
        # from the last row to the first, diagonals become columns.
        heads, diagonals = cotangent.shape[:-2], rows.size + columns.size - 1
        wide = jnp.flip(cotangent, -2)
        wide = jnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, rows.size)])
        wide = wide.reshape(*heads, -1)[..., : rows.size * diagonals]
        sums = wide.reshape(*heads, rows.size, diagonals).sum(-2)
        shared = [i for i, n in enumerate(total.table.shape[:-1]) if n == 1]
        sums = sums.sum(shared, keepdims=True) if shared else sums
        buckets = self._diagonal_buckets(rows, columns)
        return self._replace_table(
            total.table.at[..., buckets].add(sums.astype(total.table.dtype)),
            self.offset,
        )

    def _diagonal_buckets(self, rows, columns):
        """Returns the bucket of each diagonal of a tile, from its lower left corner."""
        diagonals = jnp.arange(rows.size + columns.size - 1) - (rows.size - 1)
        return self.buckets(columns.start - rows.start - self.offset + diagonals)

    def buckets(self, distance: Array) -> Array:
        """Returns the bucket of each distance s - t, in positions."""
        num_buckets = self.table.shape[-1]
        first = jnp.zeros_like(distance)
        if self.bidirectional:
            num_buckets //= 2
            first = jnp.where(distance > 0, num_buckets, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        num_exact = num_buckets // 2
        growth = jnp.log(jnp.maximum(distance, 1) / num_exact)
        growth = growth / math.log(self.max_distance / num_exact)
        far = num_exact + (growth * (num_buckets - num_exact)).astype(distance.dtype)
        far = jnp.minimum(far, num_buckets - 1)
        return first + jnp.where(distance < num_exact, distance, far)

    def _replace_table(self, table, offset):
        return RelativeBias(table, self.bidirectional, self.max_distance, offset)


@tiles.pytree(data=("values",))
class DenseBias(ScoreBias):
    """A bias spelt out as an array, `[B..., T, S]` or `[B..., H, T, S]`."""

    values: Array

    def check(self, batch_shape, num_heads, num_queries, num_keys):
        wanted = (*batch_shape, num_queries, num_keys)
        if self.values.ndim == len(batch_shape) + 3:
            wanted = (*batch_shape, num_heads, num_queries, num_keys)
        axes = "[B..., T, S] or [B..., H, T, S]"
        tiles.check_axes("bias", self.values, wanted, axes)

    def aligned(self, batch_ndim):
        values = jnp.asarray(self.values)
        return DenseBias(
            values[..., None, :, :] if values.ndim == batch_ndim + 2 else values
        )

    def aligned_tile(self, rows, columns, batch_ndim):
        values = self.aligned(batch_ndim).values
        return tiles.take(tiles.take(values, rows, axis=-2), columns, axis=-1)

    def add_gradient(self, total, cotangent, rows, columns):
        if not (isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span)):
            return super().add_gradient(total, cotangent, rows, columns)
        at = [0] * total.values.ndim
        for axis, span in ((-2, rows), (-1, columns)):
            at[axis] = span.start if total.values.shape[axis] > 1 else 0
        shape = (
            *total.values.shape[:-2],
            *(
                min(full, tile)
                for full, tile in zip(
                    total.values.shape[-2:], cotangent.shape[-2:], strict=True
                )
            ),
        )
        axes = [i for i, n in enumerate(shape) if n == 1]
        tile = cotangent.sum(axes, keepdims=True).astype(total.values.dtype)
        tile += lax.dynamic_slice(total.values, at, shape)
        return DenseBias(lax.dynamic_update_slice(total.values, tile, at))


def _stood_beside(array: Array, ndim: int) -> Array:
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)
