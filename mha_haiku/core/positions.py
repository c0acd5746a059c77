"""Encodings of positions (sinusoidal, rotary), and biases of the scores.

A score bias (ALiBi, T5's, or a whole array) is lazy like a mask: it computes tiles of
itself, `[B..., H, R, C]`, at absolute positions, to be added to the scores of R queries
and C keys. No `[T, S]` array is made unless the bias is one. Learned encodings are
parameters, and so modules, in `modules/embeddings.py`.

To add a bias, derive a class with `@tiles.pytree` from `ScoreBias`: `aligned_tile`,
`check`, and `add_gradient` if the default, a `jax.vjp` per tile, is slow; arrays are
fields `tiles.array(axes)`. Then write a function that makes it.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from mha_haiku.core import checks, tiles

__all__ = ["ScoreBias", "alibi", "as_bias", "relative_bias", "rotary", "sinusoidal"]


def sinusoidal(
    positions: Int[Array, "*B T"], size: int, *, max_period: float = 10_000.0
) -> Float[Array, "*B T D"]:
    """Computes sines and cosines of positions at geometrically spaced periods.

    They are float32, in [-1, 1]: feature 2i is a sine and 2i + 1 the cosine of the same
    angle. The longest wavelength is 2 pi `max_period` positions; D is even.

    Raises:
      ValueError: If `size` is odd or below 2.

    Source: Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762.
    """
    if size < 2 or size % 2:
        raise ValueError(f"size must be even and at least 2, got {size}.")
    angles = _angles(positions, frequencies_of(size, max_period), jnp.float32)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], size)


def rotary(
    x: Float[Array, "*B T H K"],
    positions: Int[Array, "..."],
    *,
    max_period: float = 10_000.0,
    frequencies: Sequence[float] | np.ndarray | None = None,
) -> Float[Array, "*B T H K"]:
    """Rotates the feature pairs of queries or keys by their position.

    Dot products of rotated queries and keys depend on the distance of their positions.
    Feature i is paired with feature i + K / 2 (the layout of GPT-NeoX and LLaMA), K
    even.

    Args:
      positions: `[T]` or `[..., T]`.
      max_period: The slowest pair rotates by about 1 / `max_period` radians per
        position.
      frequencies: `[K / 2]`, radians per position of each pair, instead of
        `max_period`; a pair of frequency 0 does not rotate.

    Raises:
      ValueError: If K is odd, or `positions` or `frequencies` do not fit.

    Source: Su et al. 2021 (RoFormer), eq. 34, https://arxiv.org/abs/2104.09864.

    Example:
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> mh.positions.rotary(x, jnp.arange(3))[0, 0, 0]  # position 0 does not turn
      Array([1., 1., 1., 1.], dtype=float32)
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"rotary positions need an even key size K, got {size}.")
    leading = x.shape[:-2] if jnp.ndim(positions) > 1 else x.shape[-3:-2]
    tiles.check_axes("positions", positions, leading, "[T] or [..., T]")
    if frequencies is None:
        frequencies = frequencies_of(size, max_period)
    elif np.shape(frequencies) != (size // 2,):
        raise ValueError(
            f"frequencies must be for the K / 2 = {size // 2} pairs of features, got "
            f"shape {np.shape(frequencies)}."
        )
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = _angles(positions, frequencies, dtype)[..., None, :]
    angles = angles.reshape((1,) * (x.ndim - angles.ndim) + angles.shape)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies_of(size: int, max_period: float) -> np.ndarray:
    """Computes the radians per position of each of `size` / 2 pairs of features."""
    return max_period ** (-np.arange(0, size, 2) / size)


def _angles(
    positions: ArrayLike, frequencies: Sequence[float] | np.ndarray, dtype: DTypeLike
) -> Array:
    frequencies = np.asarray(frequencies, dtype)
    positions = jnp.asarray(positions, dtype)[..., None]
    return positions * frequencies.reshape((1,) * (positions.ndim - 1) + (-1,))


def as_bias(value: "ScoreBias | ArrayLike | None") -> "ScoreBias | None":
    """Converts a score bias, None, or floats `[B..., T, S]` or `[B..., H, T, S]`."""
    if value is None or isinstance(value, ScoreBias):
        return value
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"bias must be floating point, got {value.dtype}; pass a mask of what may "
            "be attended to as mask=."
        )
    return DenseBias(value)


class ScoreBias(tiles.Part, abc.ABC):
    """A bias that is added to the scores; a pytree."""

    @abc.abstractmethod
    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        """Computes an aligned bias at `rows` x `columns`, as `[B..., H, R, C]`."""

    @abc.abstractmethod
    def check(
        self,
        batch_shape: tuple,
        num_heads: int,
        num_queries: int | None,
        num_keys: int,
    ) -> None:
        """Raises ValueError if the bias does not fit these sizes; see `Mask.check`."""

    def at_head(self, example: tuple, head: int | Array) -> Self:
        """Selects one head of one example of an aligned bias: H = 1, no batch axes."""
        index = (*example, head)
        return jax.tree.map(lambda x: tiles.at_batch(x, index)[None], self)

    def at_heads(self, heads: Sequence[int]) -> Self:
        """Selects the bias of some of the heads, in their order."""
        raise TypeError(f"{type(self).__name__} must define at_heads(heads).")

    def add_gradient(
        self,
        total: Self,
        cotangent: Array,
        rows: tiles.Positions,
        columns: tiles.Positions,
    ) -> Self:
        """Adds the gradient of a tile to `total`, the gradient of an aligned bias."""

        def tile(bias: Self) -> Array:
            values = tiles.lifted(bias.aligned_tile(rows, columns), cotangent.ndim)
            return jnp.broadcast_to(values.astype(cotangent.dtype), cotangent.shape)

        _, pullback = jax.vjp(tile, self)
        return jax.tree.map(jnp.add, total, *pullback(cotangent))


@tiles.pytree
class DenseBias(tiles.Whole, ScoreBias):
    """A bias given as a whole array, `[B..., T, S]` or `[B..., H, T, S]`."""

    name: ClassVar[str] = "bias"
    values: Array | np.ndarray = tiles.array("HTS")

    def check(
        self, batch_shape: tuple, num_heads: int, num_queries: int | None, num_keys: int
    ) -> None:
        self.check_shape(batch_shape, num_heads, num_queries, num_keys)

    def add_gradient(
        self,
        total: Any,
        cotangent: Array,
        rows: tiles.Positions,
        columns: tiles.Positions,
    ) -> Any:
        if not (isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span)):
            return super().add_gradient(total, cotangent, rows, columns)
        # An axis of size 1 broadcasts, so that its gradient is a sum over it.
        at = [0] * total.values.ndim
        for axis, span in ((-2, rows), (-1, columns)):
            at[axis] = span.start if total.values.shape[axis] > 1 else 0
        at = tiles.starts(at)
        matrix = map(min, total.values.shape[-2:], cotangent.shape[-2:])
        shape = (*total.values.shape[:-2], *matrix)
        axes = [i for i, n in enumerate(shape) if n == 1]
        tile = cotangent.sum(axes, keepdims=True).astype(total.values.dtype)
        tile += lax.dynamic_slice(total.values, at, shape)
        return DenseBias(lax.dynamic_update_slice(total.values, tile, at))


def alibi(num_heads: int) -> ScoreBias:
    """Makes the bias `-slope_h |t - s|`, with slopes in a geometric series over heads.

    Source: Press et al. 2022, section 3, https://arxiv.org/abs/2108.12409; numbers of
    heads that are not powers of two follow the authors' code.
    """
    checks.positive_integer("num_heads", num_heads)
    largest_power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / largest_power) for i in range(largest_power)]
    between = [2 ** (-4 * (2 * i + 1) / largest_power) for i in range(largest_power)]
    slopes = slopes + between[: num_heads - largest_power]
    return Alibi(np.asarray(slopes))


def relative_bias(
    table: ArrayLike, *, bidirectional: bool, max_distance: int = 128
) -> ScoreBias:
    """Makes a learned bias per head and bucket of the distance.

    Args:
      table: `[buckets, H]`. Half of a direction's buckets cover a single distance; the
        others cover ranges that grow geometrically up to `max_distance`.
      bidirectional: Whether keys after the query have separate buckets; if not, they
        share bucket 0 (for causal masks).
      max_distance: The distance, in positions, from which all share the last bucket.

    Raises:
      ValueError: If `table` is not `[buckets, H]` or has too few buckets, or
        `max_distance` lies within the exact ones.

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
    return RelativeBias(table.T, bidirectional, max_distance)


class _DistanceBias(ScoreBias):
    """A bias that depends only on the distance, with parameters for each head."""

    kind: ClassVar[str]

    def at_heads(self, heads: Sequence[int]) -> Self:
        name, axis, array = self._of_heads()
        of_heads = array.take(np.array(heads, np.int32), axis)
        return dataclasses.replace(self, **{name: of_heads})

    def check(
        self, batch_shape: tuple, num_heads: int, num_queries: int | None, num_keys: int
    ):
        _, axis, array = self._of_heads()
        if array.shape[axis] != num_heads:
            raise ValueError(
                f"the {self.kind} bias has {array.shape[axis]} heads, but attention "
                f"has {num_heads}."
            )

    def _of_heads(self) -> tuple[str, int, Array]:
        ((name, axes),) = self._own_axes().items()
        return name, axes.index("H") - len(axes), getattr(self, name)


@tiles.pytree
class Alibi(_DistanceBias):
    """`-slope_h |t - s|`; slopes `[H]` or `[B..., H]`."""

    kind: ClassVar[str] = "ALiBi"
    slopes: Array | np.ndarray = tiles.array("H")

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        distance = jnp.abs(tiles.on_rows(rows) - tiles.on_columns(columns))
        slopes = jnp.asarray(self.slopes)[..., None, None]
        return -slopes * tiles.lifted(distance.astype(slopes.dtype), slopes.ndim)


@tiles.pytree
class RelativeBias(_DistanceBias):
    """A bias per bucket of the distance; the table is `[H, buckets]`."""

    kind: ClassVar[str] = "relative"
    table: Array = tiles.array("H.")
    bidirectional: bool = tiles.static()
    max_distance: int = tiles.static()

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        if isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span):
            # One lookup per diagonal instead of one per pair.
            values = jnp.take(
                self.table, self._diagonal_buckets(rows, columns), axis=-1
            )
            diagonal = jnp.arange(columns.size)[None] - jnp.arange(rows.size)[:, None]
            return jnp.take(values, diagonal + rows.size - 1, axis=-1, mode="clip")
        distance = tiles.on_columns(columns) - tiles.on_rows(rows)
        return jnp.take(self.table, self.buckets(distance), axis=-1)

    def add_gradient(
        self,
        total: Self,
        cotangent: Array,
        rows: tiles.Positions,
        columns: tiles.Positions,
    ) -> Self:
        if not (isinstance(rows, tiles.Span) and isinstance(columns, tiles.Span)):
            return super().add_gradient(total, cotangent, rows, columns)
        # A sum along diagonals without a gather: rows are flipped, padded with R zeros
        # to R + C, and the same numbers are reread in rows of R + C - 1. So each row is
        # shifted one further to the right than the one before: the cells of a diagonal
        # are in one column, and a single sum over rows adds up all diagonals.
        heads, diagonals = cotangent.shape[:-2], rows.size + columns.size - 1
        wide = jnp.flip(cotangent, -2)
        wide = jnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, rows.size)])
        wide = wide.reshape(*heads, -1)[..., : rows.size * diagonals]
        sums = wide.reshape(*heads, rows.size, diagonals).sum(-2)
        shared = [i for i, n in enumerate(total.table.shape[:-1]) if n == 1]
        sums = sums.sum(shared, keepdims=True) if shared else sums
        sums = sums.astype(total.table.dtype)
        table = total.table.at[..., self._diagonal_buckets(rows, columns)].add(sums)
        return dataclasses.replace(self, table=table)

    def _diagonal_buckets(self, rows: tiles.Span, columns: tiles.Span) -> Array:
        """Finds the bucket of each diagonal of a tile, from the lower left corner."""
        diagonals = jnp.arange(rows.size + columns.size - 1) - (rows.size - 1)
        return self.buckets(columns.start - rows.start + diagonals)

    def buckets(self, distance: Array) -> Array:
        """Finds the bucket of each distance s - t, in positions."""
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
