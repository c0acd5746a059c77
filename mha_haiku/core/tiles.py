"""How rectangles of `[B..., H, T, S]` arrays are addressed, and what they are made of.

Masks and score biases are pytrees that give tiles of themselves: positions of rows and
columns come in, and arrays that broadcast against `[B..., H, T, S]` go out.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku.core import checks, display

Array = jax.Array
Index = slice | range | np.ndarray | Array


def _static_integers(cls):
    """Makes a frozen dataclass a pytree: arrays in it are leaves, integers are static.

    So what is known of positions while a program is compiled stays known.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(x):
        values = [getattr(x, name) for name in names]
        # None in the place of an integer, as None has no leaf.
        leaves = [None if isinstance(value, int) else value for value in values]
        return leaves, tuple(v if isinstance(v, int) else None for v in values)

    def unflatten(integers, leaves):
        pairs = zip(integers, leaves, strict=True)
        return cls(*(leaf if n is None else n for n, leaf in pairs))

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


@_static_integers
class Span:
    """Positions from `start` on, `size` of them.

    Stands for an array of positions, but arrays are sliced by it and not gathered.
    """

    start: int | Array  # an integer, or a scalar array that may be traced
    size: int  # an integer

    def __len__(self) -> int:
        return self.size

    def __add__(self, offset: int | Array) -> "Span":
        return Span(self.start + offset, self.size)

    @property
    def stop(self) -> int | Array:
        """The position after the last."""
        return self.start + self.size

    def array(self) -> Array:
        """Returns the positions, `[size]`."""
        return self.start + lax.iota(jnp.int32, self.size)


@_static_integers
class Origin:
    """Where a rectangle stands: the positions of its first query and first key.

    Queries and keys in arrays are counted from here; masks and biases are asked at
    absolute positions, which `rows` and `columns` give.
    """

    query: int | Array = 0  # an integer, or a scalar array that may be traced
    key: int | Array = 0  # as the query

    def rows(self, rows: Index | Span) -> Index | Span:
        """Returns the absolute positions of queries."""
        return rows if _is_zero(self.query) else rows + self.query

    def columns(self, columns: Index | Span) -> Index | Span:
        """Returns the absolute positions of keys."""
        return columns if _is_zero(self.key) else columns + self.key

    def at(
        self, rows: Index | Span, columns: Index | Span
    ) -> tuple[Index | Span, Index | Span]:
        """Returns the absolute positions of both."""
        return self.rows(rows), self.columns(columns)

    def moved(self, by: "Origin") -> "Origin":
        """Returns where a part stands that begins at `by` of what stands here."""
        return Origin(self.query + by.query, self.key + by.key)


def _is_zero(position) -> bool:
    return isinstance(position, int) and position == 0


def batch_axes(ndim: int) -> str:
    """Returns a letter for each batch axis: "B" for the first, "b" for the others.

    The first alone is that which devices share.
    """
    return "Bb"[:ndim] + "b" * (ndim - 2)


def static(default: Any = dataclasses.MISSING) -> Any:
    """Returns a field of a `pytree` that is no leaf: programs are compiled for it."""
    return dataclasses.field(default=default, metadata={"static": True})


def array(axes: str, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field of a `pytree` that is an array `[B..., *axes]`, once aligned.

    Axes are letters: "H" (heads), "T" (queries), "S" (keys), "." (others).
    """
    return dataclasses.field(default=default, metadata={"axes": axes})


def pytree(cls: type) -> type:
    """Makes a class a frozen dataclass and a pytree, leaves all fields but `static`.

    It shows the shapes of its arrays and none of their numbers, if it does not say
    otherwise itself.
    """
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = display.record
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    return jax.tree_util.register_dataclass(cls)


class Part:
    """What masks, biases and scores share: arrays whose axes are known by letters."""

    def axes(self) -> Self:
        """Returns an aligned part with letters of axes in the place of its arrays.

        Each axis has a letter: first from `batch_axes`, then from the field's `array`.
        What shares arrays among devices goes by it.

        Raises:
          TypeError: If an array is in another field.
        """
        letters = {
            name: batch_axes(jnp.ndim(getattr(self, name)) - len(own)) + own
            for name, own in self._own_axes().items()
        }
        if len(letters) != len(jax.tree.leaves(self)):
            raise TypeError(
                f"{type(self).__name__} must say its axes() to be shared, or have "
                "tiles.array(...) as its fields."
            )
        return dataclasses.replace(self, **letters) if letters else self

    def _own_axes(self) -> dict[str, str]:
        """Returns the axes behind B... of each array, by its field."""
        fields = getattr(self, "__dataclass_fields__", {})
        return {
            name: field.metadata["axes"]
            for name, field in fields.items()
            if "axes" in field.metadata and getattr(self, name) is not None
        }

    def _lifted(self, batch_ndim: int) -> Self:
        """Returns the same with axes B... of size 1 where arrays have none."""
        arrays = {
            name: lifted(getattr(self, name), batch_ndim + len(own))
            for name, own in self._own_axes().items()
        }
        return dataclasses.replace(self, **arrays) if arrays else self


def checked_pytree(name: str, value: Any) -> Any:
    """Checks that the class of `value` is registered as a pytree.

    Raises:
      TypeError: If it is not.
    """
    if jax.tree.structure(value) == jax.tree.structure(0):
        raise TypeError(
            f"{name} must be a pytree, and {type(value).__name__} is not registered as "
            "one: put @jax.tree_util.register_dataclass on\n"
            "@dataclasses.dataclass(frozen=True) on the class; fields that are no "
            "arrays are dataclasses.field(metadata={'static': True})."
        )
    return value


def positions(index: Index, size: int | None = None) -> Array:
    """Returns the positions that a slice, a range or an array of integers names.

    Args:
      index: What to name; a slice needs an end where `size` is not given.
      size: How many positions there are, where known.

    Raises:
      ValueError: If a slice has no end, or an array is not of integers in one axis.
    """
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


def as_array(index: Array | Span) -> Array:
    """Converts positions to an array."""
    return index.array() if isinstance(index, Span) else jnp.asarray(index)


def on_rows(rows: Array | Span) -> Array:
    """Reshapes positions `[R]` to `[R, 1]`, to broadcast with `[R, C]`."""
    return as_array(rows)[:, None]


def on_columns(columns: Array | Span) -> Array:
    """Reshapes positions `[C]` to `[1, C]`, to broadcast with `[R, C]`."""
    return as_array(columns)[None]


def lifted(array: Array, ndim: int) -> Array:
    """Adds leading axes of size 1 until there are `ndim`."""
    array = jnp.asarray(array)
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def take(array: Array, index: Array | Span, axis: int) -> Array:
    """Indexes an axis of `array`; an axis of size 1 stands for all positions.

    Raises:
      ValueError: If a position that is known on the host is outside of the axis.
    """
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


def rectangle(array: Array, rows: Array | Span, columns: Array | Span) -> Array:
    """Cuts `[..., R, C]` out of `[..., T, S]`; see `take`."""
    return take(take(array, rows, axis=-2), columns, axis=-1)


def with_heads(array: Array, batch_ndim: int) -> Array:
    """Adds an axis of heads to `[B..., T, S]`; `[B..., H, T, S]` has one."""
    array = jnp.asarray(array)
    return array if array.ndim == batch_ndim + 3 else array[..., None, :, :]


def at_batch(array: Array, index: tuple[Array, ...]) -> Array:
    """Indexes the leading axes of `array`; size 1 stands for any."""
    array = jnp.asarray(array)
    if 0 in array.shape[: len(index)]:  # traced for an empty batch, but never run
        return jnp.zeros(array.shape[len(index) :], array.dtype)
    for i in index:
        array = array[0] if array.shape[0] == 1 else array[i]
    return array


def add(total: Array, part: Array, start: int | Array, axis: int) -> Array:
    """Adds `part` to `total` from position `start` of an axis on."""
    part += lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, part, start, axis)


def largest(first, second):
    """Returns the larger of two integers, either of which may be traced."""
    both_known = isinstance(first, int) and isinstance(second, int)
    return max(first, second) if both_known else jnp.maximum(first, second)


def smallest(first, second):
    """Returns the smaller of two integers, either of which may be traced."""
    both_known = isinstance(first, int) and isinstance(second, int)
    return min(first, second) if both_known else jnp.minimum(first, second)


def known(array) -> np.ndarray | None:
    """Returns the numbers of an array, or None while it is being traced."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def integers(name: str, value, low: int | None = 0) -> Array:
    """Checks that `value` has integers of at least `low`, and converts to an array."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}.")
    numbers = known(array)
    if low is not None and numbers is not None and (numbers < low).any():
        raise ValueError(f"{name} must be at least {low}, got {numbers.min()}.")
    return array


def check_axes(name: str, array: Array, wanted: tuple, axes: str):
    """Raises ValueError unless the shape is `wanted`; size 1 and None stand for any."""
    shape = jnp.shape(array)
    fits = len(shape) == len(wanted) and all(
        full_size is None or size in (1, full_size)
        for size, full_size in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must be {axes}, which is {wanted} here (an axis may have size 1); "
            f"got shape {shape}."
        )


def check_matrix(
    name: str,
    array: Array,
    batch_shape: tuple,
    num_heads: int,
    num_queries: int,
    num_keys: int,
):
    """Raises ValueError unless an array is `[B..., T, S]` or `[B..., H, T, S]`."""
    heads = (num_heads,) if jnp.ndim(array) == len(batch_shape) + 3 else ()
    wanted = (*batch_shape, *heads, num_queries, num_keys)
    check_axes(name, array, wanted, "[B..., T, S] or [B..., H, T, S]")


def checked_first(first_query: Any) -> int | Array:
    """Returns the position of the first query as an integer, or a traced scalar array.

    Raises:
      ValueError: If it is not one integer, or below 0 where it is known.
    """
    known_ = known(first_query)
    if known_ is not None:
        return checks.non_negative_integer("first_query", known_.tolist())
    if first_query.ndim or not jnp.issubdtype(first_query.dtype, jnp.integer):
        raise ValueError(
            f"first_query must be one integer, got {first_query.dtype} of shape "
            f"{first_query.shape}."
        )
    return first_query
