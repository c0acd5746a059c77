"""Masks made of arrays: lengths, segment ids, or the mask itself."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mha_haiku.core import display, tiles
from mha_haiku.core.masks import algebra, relative

Mask = algebra.Mask


def padding(
    lengths: ArrayLike | Sequence[int],
    query_lengths: ArrayLike | Sequence[int] | None = None,
) -> Mask:
    """Makes the mask of each example's first keys, for its first queries.

    Args:
      lengths: `[B...]` integers in 0..S.
      query_lengths: `[B...]` integers of at least 0; later queries see nothing.
        Defaults to all queries.

    Raises:
      ValueError: If lengths are not integers of at least 0, or disagree on batch axes.

    Example:
      >>> mask = mh.masks.padding([2, 4])  # lengths of two examples
      >>> mask.tile([0], range(4)).astype(int).tolist()
      [[[1, 1, 0, 0]], [[1, 1, 1, 1]]]
    """
    lengths = tiles.integers("lengths", lengths)
    if query_lengths is not None:
        query_lengths = tiles.integers("query_lengths", query_lengths)
        if query_lengths.ndim != lengths.ndim:
            raise ValueError(
                "lengths and query_lengths must have the same batch axes, got shapes "
                f"{lengths.shape} and {query_lengths.shape}."
            )
    return Padding(lengths, query_lengths)


def segments(
    query_ids: ArrayLike | Sequence[int],
    key_ids: ArrayLike | Sequence[int] | None = None,
) -> Mask:
    """Makes the mask of keys in the same segment as the query.

    Args:
      query_ids: `[B..., T]` integers.
      key_ids: `[B..., S]` integers. Defaults to the ids of the queries.

    Raises:
      ValueError: If ids are not integers, or disagree on the number of axes.

    Example:
      >>> mask = mh.masks.segments(np.array([0, 0, 1]))  # packed texts
      >>> np.array(mask.tile(range(3), range(3)), int)
      array([[1, 1, 0],
             [1, 1, 0],
             [0, 0, 1]])
    """
    query_ids = tiles.integers("query_ids", query_ids, low=None)
    key_ids = (
        query_ids if key_ids is None else tiles.integers("key_ids", key_ids, low=None)
    )
    if query_ids.ndim < 1 or query_ids.ndim != key_ids.ndim:
        raise ValueError(
            "segment ids must be [B..., T] and [B..., S], got shapes "
            f"{query_ids.shape} and {key_ids.shape}."
        )
    return Segments(query_ids, key_ids)


def dense(array: Array | np.ndarray) -> Mask:
    """Makes a mask of booleans or 0/1, `[B..., T, S]` or `[B..., H, T, S]`.

    Raises:
      ValueError: If the array is neither boolean nor 0/1, or has less than two axes.

    Example:
      >>> mask = mh.masks.dense(np.eye(3, dtype=bool))
      >>> np.array(mask.tile([1], range(3)), int)
      array([[0, 1, 0]])
    """
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.integer):
        concrete = tiles.known(array)
        if concrete is not None and not np.isin(concrete, (0, 1)).all():
            raise ValueError(
                "mask must be boolean or 0/1 integers, got other integers; "
                "for lengths use masks.padding(lengths)."
            )
        array = array != 0
    if array.dtype != bool:
        raise ValueError(
            f"mask must be boolean or 0/1 integers, got {array.dtype}; "
            "pass an additive score as bias=."
        )
    if array.ndim < 2:
        raise ValueError(
            f"mask must be [B..., T, S] or [B..., H, T, S], got shape {array.shape}; "
            "for lengths use masks.padding(lengths)."
        )
    return Dense(array)


def as_mask(
    value: Mask | Array | np.ndarray | Callable[[Array, Array], Array] | None,
) -> Mask:
    """Converts a mask, an array, a function, or None (everything) to a mask.

    Example:
      >>> mh.masks.as_mask(None)
      full()
      >>> mh.masks.as_mask(np.tri(3, dtype=bool)).tile(range(3), range(3)).sum()
      Array(6, dtype=int32)
    """
    if isinstance(value, Mask):
        return tiles.checked_pytree("mask", value)
    if value is None:
        return relative.full()
    return relative.where(value) if callable(value) else dense(value)


@tiles.pytree
class Padding(Mask):
    """The first keys of each example, for its first queries."""

    lengths: Array | np.ndarray = tiles.array("")
    query_lengths: Array | np.ndarray | None = tiles.array("")

    def __repr__(self):
        sides = (x for x in (self.lengths, self.query_lengths) if x is not None)
        return f"padding({', '.join(map(display.numbers, sides))})"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        lengths = jnp.asarray(self.lengths)[..., None, None, None]
        seen = tiles.lifted(tiles.on_columns(columns), lengths.ndim) < lengths
        if self.query_lengths is None:
            return seen
        lengths = jnp.asarray(self.query_lengths)[..., None, None, None]
        return seen & (tiles.lifted(tiles.on_rows(rows), lengths.ndim) < lengths)

    def check_lengths(self, num_keys: int):
        concrete = tiles.known(self.lengths)
        if concrete is not None and (concrete > num_keys).any():
            raise ValueError(
                f"lengths must be in 0..S = 0..{num_keys}, got {concrete.max()}."
            )

    def key_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        longest = self._reduced(lambda lengths: lengths.max(initial=0))
        return algebra.overlap((keys[0], longest), keys)

    def open_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        start, stop = keys
        if jnp.size(self.lengths):
            shortest = self._reduced(lambda lengths: lengths.min())
            start, stop = algebra.overlap((keys[0], shortest), keys)
        if self.query_lengths is None:
            return start, stop
        return start, jnp.where(rows[1] <= jnp.min(self.query_lengths), stop, start)

    def _reduced(self, function: Callable[[Array | np.ndarray], Any]) -> int | Array:
        concrete = tiles.known(self.lengths)
        return function(self.lengths) if concrete is None else int(function(concrete))

    def unseen_keys(
        self,
        num_queries: int,
        num_keys: int,
        first_query: int | Array = 0,
        first_key: int | Array = 0,
    ) -> Array:
        keys = tiles.lifted(
            first_key + jnp.arange(num_keys), jnp.ndim(self.lengths) + 2
        )
        unseen = (keys >= self.lengths[..., None, None]) | (num_queries == 0)
        if self.query_lengths is None:
            return unseen
        return unseen | (self.query_lengths <= first_query)[..., None, None]

    def fully_masked(
        self, num_queries: int, num_keys: int, first_query: int | Array = 0
    ) -> Array | np.ndarray | None:
        queries = first_query + jnp.arange(num_queries)
        queries = tiles.lifted(queries, jnp.ndim(self.lengths) + 2)
        # `queries >= first_query` is always true; it gives the axis of queries its
        # size.
        masked = (self.lengths <= 0)[..., None, None] & (queries >= first_query)
        if self.query_lengths is None:
            return masked
        return masked | (queries >= self.query_lengths[..., None, None])


@tiles.pytree
class Segments(Mask):
    """The keys in the query's segment."""

    query_ids: Array | np.ndarray = tiles.array("T")
    key_ids: Array | np.ndarray = tiles.array("S")

    def __repr__(self):
        ids = [self.query_ids]
        if self.key_ids is not self.query_ids:
            ids.append(self.key_ids)
        return f"segments({', '.join(map(display.value, ids))})"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        query_ids = tiles.take(self.query_ids, rows, axis=-1)
        key_ids = tiles.take(self.key_ids, columns, axis=-1)
        return query_ids[..., None, :, None] == key_ids[..., None, None, :]

    def key_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        # Ids from the smallest to the largest: more keys than needed if ids do not
        # rise.
        smallest, largest = self._ids_of(rows)
        seen = (self.key_ids >= smallest) & (self.key_ids <= largest)
        return _within(_hull(seen), keys)

    def open_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        if jnp.ndim(self.key_ids) > 1:
            return keys[0], keys[0]
        # Open if all these queries are in one segment, whose keys have no gap.
        smallest, largest = self._ids_of(rows)
        seen = self.key_ids == smallest
        hull = _hull(seen)
        size = 1 if hull is None else hull[1] - hull[0]
        is_open = (smallest == largest) & (seen.sum() == size)
        start, stop = _within(hull, keys)
        return start, jnp.where(is_open, stop, start)

    def _ids_of(self, rows: algebra.Range) -> tuple[Array, Array]:
        """Finds the smallest and largest segment id of the queries."""
        ids = jnp.asarray(self.query_ids)
        limits = jnp.iinfo(ids.dtype)
        at = jnp.arange(ids.shape[-1])
        inside = (at >= rows[0]) & (at < rows[1]) | (ids.shape[-1] == 1)
        inside = jnp.broadcast_to(inside, ids.shape)
        smallest = jnp.min(jnp.where(inside, ids, limits.max), initial=limits.max)
        return smallest, jnp.max(jnp.where(inside, ids, limits.min), initial=limits.min)


@tiles.pytree
class Dense(tiles.Whole, Mask):
    """A mask given as a whole array."""

    name: ClassVar[str] = "mask"
    values: Array | np.ndarray = tiles.array("HTS")

    def __repr__(self):
        return f"dense({display.value(self.values)})"

    def batch_ranks(self) -> tuple[int, ...]:
        rank = jnp.ndim(self.values)
        return (rank - 2, rank - 3) if rank > 2 else (0,)

    def has_heads(self) -> bool:
        return self.values.shape[-3] > 1

    def at_head(self, example: tuple, head: int | Array) -> "Dense":
        return Dense(tiles.at_batch(self.values, (*example, head))[None])


def _hull(seen: Array | np.ndarray) -> tuple[Array, Array] | None:
    """Finds (start, stop) of the keys `[B..., S]` that are seen in any example."""
    # None if it is not known, as one entry broadcasts to all keys.
    num_keys = seen.shape[-1]
    if num_keys == 1:
        return None
    in_any = seen.reshape(-1, num_keys).any(0)
    stop = jnp.max(jnp.where(in_any, jnp.arange(1, num_keys + 1), 0), initial=0)
    start = jnp.min(jnp.where(in_any, jnp.arange(num_keys), stop), initial=num_keys)
    return start, stop


def _within(hull: tuple | None, keys: algebra.Range) -> algebra.Range:
    return keys if hull is None else algebra.overlap(hull, keys)
