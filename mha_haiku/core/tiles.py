"""Tiles of `[B..., H, T, S]` arrays, and the base of masks, biases and scores.

Masks and score biases are pytrees that compute tiles of themselves: they take positions
of rows and columns, and return arrays that broadcast against `[B..., H, T, S]`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core, lax
from jax.typing import ArrayLike

from mha_haiku.core import checks, display

Index = slice | range | np.ndarray | Array  # positions, as callers give them
_Instance = TypeVar("_Instance")


@dataclass_transform(frozen_default=True)
def _static_integers(cls: Any) -> Any:
    """Makes a frozen dataclass a pytree: arrays are leaves, integers are static."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(x: Any) -> tuple[list, tuple]:
        values = [getattr(x, name) for name in names]
        # None in the place of an integer, as None has no leaf.
        leaves = [None if isinstance(value, int) else value for value in values]
        return leaves, tuple(v if isinstance(v, int) else None for v in values)

    def unflatten(integers: tuple, leaves: Sequence) -> Any:
        pairs = zip(integers, leaves, strict=True)
        return cls(*(leaf if n is None else n for n, leaf in pairs))

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@_static_integers
class Span:
    """Consecutive positions from `start`, so that arrays are sliced, not gathered."""

    start: int | Array  # an integer, or a scalar array that may be traced
    size: int  # an integer

    def __len__(self) -> int:
        return self.size

    def __add__(self, offset: int | Array) -> "Span":
        return Span(self.start + offset, self.size)

    @property
    def stop(self) -> int | Array:
        return self.start + self.size

    def array(self) -> Array:
        return self.start + lax.iota(jnp.int32, self.size)


Positions = Array | np.ndarray | Span  # positions of rows or of columns of a tile
_Positions = TypeVar("_Positions", Span, Array | np.ndarray)


@_static_integers
class Origin:
    """The position of a rectangle: its first query and its first key."""

    query: int | Array = 0  # an integer, or a scalar array that may be traced
    key: int | Array = 0  # like `query`

    def rows(self, rows: _Positions) -> _Positions:
        return rows + self.query

    def columns(self, columns: _Positions) -> _Positions:
        return columns + self.key

    def at(
        self, rows: _Positions, columns: _Positions
    ) -> tuple[_Positions, _Positions]:
        return self.rows(rows), self.columns(columns)

    def moved(self, by: "Origin") -> "Origin":
        """Returns the origin of the part that begins at `by` in this rectangle."""
        return Origin(self.query + by.query, self.key + by.key)


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a `pytree` that is static: programs are compiled for it."""
    return dataclasses.field(default=default, metadata={"static": True})


def array(axes: str, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of a `pytree` that is an array `[B..., *axes]`, once aligned.

    Axes are letters: "H" (heads), "T" (queries), "S" (keys), "." (others).
    """
    return dataclasses.field(default=default, metadata={"axes": axes})


@dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, array)
)
def pytree(cls: type[_Instance]) -> type[_Instance]:
    """Makes a class a frozen dataclass and a pytree; `static` fields are not leaves."""
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = display.record
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    return jax.tree_util.register_dataclass(cls)


class Part:
    """The base of masks, biases and scores: arrays whose axes have letters."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # of the subclasses

    def axes(self) -> Self:
        """Returns an aligned part with the letters of axes in place of its arrays."""
        letters = {}
        for name, axes in self._own_axes().items():
            # "B" is the first batch axis, which devices share; "b" is any other.
            batch_ndim = jnp.ndim(getattr(self, name)) - len(axes)
            letters[name] = ("B" + "b" * batch_ndim)[:batch_ndim] + axes
        if len(letters) != len(jax.tree.leaves(self)):
            raise TypeError(
                f"{type(self).__name__} must define axes() or declare its fields by "
                "tiles.array(...) to be sharded."
            )
        return dataclasses.replace(self, **letters) if letters else self

    def _own_axes(self) -> dict[str, str]:
        """Returns the axes of each array after B..., by field."""
        fields = getattr(self, "__dataclass_fields__", {})
        return {
            name: field.metadata["axes"]
            for name, field in fields.items()
            if "axes" in field.metadata and getattr(self, name) is not None
        }

    def aligned(self, batch_ndim: int) -> Self:
        """Aligns the part: its arrays get axes B..., of size 1 if they lack them."""
        arrays = {
            name: lifted(getattr(self, name), batch_ndim + len(axes))
            for name, axes in self._own_axes().items()
        }
        return dataclasses.replace(self, **arrays) if arrays else self


class Whole(Part):
    """A part given as a whole array `values`, `[B..., T, S]` or `[B..., H, T, S]`."""

    name: ClassVar[str]  # in messages
    values: Array | np.ndarray

    def check_shape(
        self,
        batch_shape: tuple,
        num_heads: int,
        num_queries: int | None,
        num_keys: int,
    ) -> None:
        """Raises ValueError unless the array is of these sizes."""
        heads = (num_heads,) if jnp.ndim(self.values) == len(batch_shape) + 3 else ()
        shape = (*batch_shape, *heads, num_queries, num_keys)
        check_axes(self.name, self.values, shape, "[B..., T, S] or [B..., H, T, S]")

    def aligned(self, batch_ndim: int) -> Self:
        values = jnp.asarray(self.values)
        if values.ndim < batch_ndim + 3:  # there is no axis of heads
            values = values[..., None, :, :]
        return dataclasses.replace(self, values=values)

    def aligned_tile(self, rows: Positions, columns: Positions) -> Array:
        return take(take(self.values, rows, axis=-2), columns, axis=-1)


def checked_pytree(name: str, value: Any) -> Any:
    """Checks that the class of `value` is registered as a pytree."""
    if jax.tree.structure(value) == jax.tree.structure(0):
        raise TypeError(
            f"{name} must be a pytree, and {type(value).__name__} is not registered as "
            "one: put @jax.tree_util.register_dataclass on\n"
            "@dataclasses.dataclass(frozen=True) on the class; fields that are not "
            "arrays are dataclasses.field(metadata={'static': True})."
        )
    return value


def positions(index: Index, size: int | None = None) -> Array | np.ndarray:
    """Returns the positions of a slice (with an end, or of `size`), range or array."""
    if isinstance(index, slice):
        if size is not None:
            return np.arange(size)[index]
        if index.stop is None or index.stop < 0 or (index.start or 0) < 0:
            raise ValueError(
                f"a tile of a mask needs a slice with ends of at least 0, got {index}; "
                "a mask does not know how many positions there are."
            )
        return np.arange(index.start or 0, index.stop, index.step or 1)
    if isinstance(index, range):
        index = np.arange(index.start, index.stop, index.step)
    index = index if isinstance(index, jax.Array) else np.asarray(index)
    if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            "positions must be a slice, a range or one axis of integers, got "
            f"{index.dtype} of shape {index.shape}."
        )
    known_index = known(index)
    if size is not None and known_index is not None and known_index.size:
        if known_index.min() < -size or known_index.max() >= size:
            raise ValueError(
                f"positions must be in {-size}..{size - 1}, got "
                f"{known_index.min()}..{known_index.max()}."
            )
        return known_index % size
    return index


def as_array(index: Positions) -> Array:
    """Converts positions to an array."""
    return index.array() if isinstance(index, Span) else jnp.asarray(index)


def on_rows(rows: Positions) -> Array:
    """Reshapes positions `[R]` to `[R, 1]`, to broadcast with `[R, C]`."""
    return as_array(rows)[:, None]


def on_columns(columns: Positions) -> Array:
    """Reshapes positions `[C]` to `[1, C]`, to broadcast with `[R, C]`."""
    return as_array(columns)[None]


def lifted(array: ArrayLike, ndim: int) -> Array:
    """Adds leading axes of size 1 until there are `ndim`."""
    array = jnp.asarray(array)
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def take(array: Array | np.ndarray, index: Positions, axis: int) -> Array:
    """Indexes an axis of `array`; an axis of size 1 broadcasts to all positions."""
    size = array.shape[axis]
    if size == 1:
        return jnp.repeat(array, len(index), axis=axis)
    if isinstance(index, Span):
        return lax.dynamic_slice_in_dim(array, index.start, index.size, axis)
    if not isinstance(index, jax.Array):
        if np.array_equal(index, np.arange(size)):
            return jnp.asarray(array)
        if len(index) and (np.min(index) < 0 or np.max(index) >= size):
            raise ValueError(
                f"positions must be in 0..{size - 1} here, got "
                f"{np.min(index)}..{np.max(index)}."
            )
    return jnp.take(array, jnp.asarray(index), axis=axis, mode="clip")


def at_batch(array: ArrayLike, index: tuple[int | Array, ...]) -> Array:
    """Indexes the leading axes of `array`; axes of size 1 broadcast."""
    array = jnp.asarray(array)
    if 0 in array.shape[: len(index)]:  # an empty batch is traced, but never run
        return jnp.zeros(array.shape[len(index) :], array.dtype)
    for i in index:
        array = array[0] if array.shape[0] == 1 else array[i]
    return array


def add(total: Array, part: Array, start: int | Array, axis: int) -> Array:
    """Adds `part` to `total`, starting at position `start` of an axis."""
    part += lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, part, start, axis)


def over_rows(
    block: Callable[[Any, Array, Array], tuple],
    begin: Any,
    length: int,
    rows: int,
    axes: int | list[int],
) -> tuple[Any, Any]:
    """Folds `block(total, positions, is_new)` over blocks of rows, in order.

    Joins what it returns of the rows along an axis, or along the axis of each. If rows
    do not divide the length, the last block begins with rows that are not new.
    """
    count = -(-length // rows)

    def step(total: Any, number: Array) -> tuple:
        at = jnp.minimum(number * rows, length - rows) + jnp.arange(rows)
        return block(total, at, at >= number * rows)

    def joined(parts: Array, axis: int) -> Array:
        whole = lax.collapse(jnp.moveaxis(parts, 0, axis), axis, axis + 2)
        if count * rows == length:
            return whole
        before = lax.slice_in_dim(whole, 0, (count - 1) * rows, axis=axis)
        last = lax.slice_in_dim(
            whole, 2 * count * rows - rows - length, None, axis=axis
        )
        return jnp.concatenate([before, last], axis)

    total, parts = lax.scan(step, begin, jnp.arange(count))
    axes = axes if isinstance(axes, list) else jax.tree.map(lambda _: axes, parts)
    return total, jax.tree.map(joined, parts, axes)


def starts(at: Sequence[int | Array]) -> list[Array]:
    """Converts the starts of a slice along all axes to one dtype, as JAX requires."""
    return [jnp.asarray(start, jnp.int32) for start in at]


def largest(first: int | Array, second: int | Array) -> int | Array:
    """Returns the larger of two integers, either of which may be traced."""
    if isinstance(first, int) and isinstance(second, int):
        return max(first, second)
    return jnp.maximum(first, second)


def smallest(first: int | Array, second: int | Array) -> int | Array:
    """Returns the smaller of two integers, either of which may be traced."""
    if isinstance(first, int) and isinstance(second, int):
        return min(first, second)
    return jnp.minimum(first, second)


def known(array: Any) -> np.ndarray | None:
    """Returns the numbers of an array, or None while it is being traced."""
    return None if isinstance(array, core.Tracer) else np.asarray(array)


def integers(
    name: str, value: Any, low: int | None = 0, high: int | None = None
) -> Array | np.ndarray:
    """Checks that `value` holds integers from `low` to `high`; returns an array."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}.")
    numbers = known(array)
    if low is not None and numbers is not None and (numbers < low).any():
        raise ValueError(f"{name} must be at least {low}, got {numbers.min()}.")
    if high is not None and numbers is not None and (numbers > high).any():
        raise ValueError(f"{name} must be at most {high}, got {numbers.max()}.")
    return array


def check_axes(name: str, array: ArrayLike, sizes: tuple, axes: str) -> None:
    """Raises ValueError unless the shape is `sizes`; 1 and None match any size."""
    shape = jnp.shape(array)
    fits = len(shape) == len(sizes) and all(
        full_size is None or size in (1, full_size)
        for size, full_size in zip(shape, sizes, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must be {axes}, which is {sizes} here (an axis may have size 1); "
            f"got shape {shape}."
        )


def checked_first(first: Any, name: str = "first_query") -> int | Array:
    """Checks the position of the first query: an integer, or a traced scalar array."""
    known_ = known(first)
    if known_ is not None:
        return checks.non_negative_integer(name, known_.tolist())
    if first.ndim or not jnp.issubdtype(first.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be one integer, got {first.dtype} of shape {first.shape}."
        )
    return first
