"""Masks made of whole arrays: segment ids, or the mask itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import display, tiles
from mha_haiku.core.masks import algebra, relative

Array = jax.Array
Mask = algebra.Mask


def segments(query_ids: Array, key_ids: Array | None = None) -> Mask:
    """Makes the mask of keys in the same segment as the query.

    Args:
      query_ids: `[B..., T]` integers.
      key_ids: `[B..., S]` integers; None: the ids of the queries.

    Raises:
      ValueError: If ids are no integers, or disagree on the number of axes.
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


def dense(array: Array) -> Mask:
    """Makes a mask of booleans or 0/1, `[B..., T, S]` or `[B..., H, T, S]`.

    Raises:
      ValueError: If the array is neither boolean nor 0/1, or has less than two axes.
    """
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.integer):
        known = tiles.known(array)
        if known is not None and not np.isin(known, (0, 1)).all():
            raise ValueError(
                "mask must be boolean or 0/1 integers, got other integers; "
                "lengths become a mask by masks.padding(lengths)."
            )
        array = array != 0
    if array.dtype != bool:
        raise ValueError(
            f"mask must be boolean or 0/1 integers, got {array.dtype}; "
            "an additive score goes in bias=."
        )
    if array.ndim < 2:
        raise ValueError(
            f"mask must be [B..., T, S] or [B..., H, T, S], got shape {array.shape}; "
            "lengths become a mask by masks.padding(lengths)."
        )
    return Dense(array)


def as_mask(
    value: Mask | Array | Callable[[Array, Array], Array] | None,
) -> Mask:
    """Converts a mask, an array, a function, or None (everything) to a mask."""
    if isinstance(value, Mask):
        return tiles.checked_pytree("mask", value)
    if value is None:
        return relative.full()
    return relative.where(value) if callable(value) else dense(value)


@tiles.pytree
class Segments(Mask):
    """Keys of the query's own segment."""

    query_ids: Array = tiles.array("T")
    key_ids: Array = tiles.array("S")

    def __repr__(self):
        ids = [self.query_ids]
        if self.key_ids is not self.query_ids:
            ids.append(self.key_ids)
        return f"segments({', '.join(map(display.value, ids))})"

    def aligned_tile(self, rows, columns):
        query_ids = tiles.take(self.query_ids, rows, axis=-1)
        key_ids = tiles.take(self.key_ids, columns, axis=-1)
        return query_ids[..., None, :, None] == key_ids[..., None, None, :]

    def key_range(self, rows, keys):
        # Ids from the smallest to the largest: too many keys where ids do not rise.
        smallest, largest = self._ids_of(rows)
        seen = (self.key_ids >= smallest) & (self.key_ids <= largest)
        return _within(_hull(seen), keys)

    def open_range(self, rows, keys):
        if jnp.ndim(self.key_ids) > 1:
            return keys[0], keys[0]
        # Open where all these queries are of one segment, whose keys have no gap.
        smallest, largest = self._ids_of(rows)
        seen = self.key_ids == smallest
        hull = _hull(seen)
        size = 1 if hull is None else hull[1] - hull[0]
        is_open = (smallest == largest) & (seen.sum() == size)
        start, stop = _within(hull, keys)
        return start, jnp.where(is_open, stop, start)

    def _ids_of(self, rows) -> tuple[Array, Array]:
        """Finds the smallest and largest segment id of the queries."""
        ids = jnp.asarray(self.query_ids)
        limits = jnp.iinfo(ids.dtype)
        at = jnp.arange(ids.shape[-1])
        inside = (at >= rows[0]) & (at < rows[1]) | (ids.shape[-1] == 1)
        inside = jnp.broadcast_to(inside, ids.shape)
        smallest = jnp.min(jnp.where(inside, ids, limits.max), initial=limits.max)
        return smallest, jnp.max(jnp.where(inside, ids, limits.min), initial=limits.min)


@tiles.pytree
class Dense(Mask):
    """A mask spelt out as an array."""

    values: Array = tiles.array("HTS")

    def __repr__(self):
        return f"dense({display.value(self.values)})"

    def batch_ranks(self):
        rank = jnp.ndim(self.values)
        return (rank - 2, rank - 3) if rank > 2 else (0,)

    def has_heads(self):
        return self.values.shape[-3] > 1

    def check_shape(self, *sizes):
        tiles.check_matrix("mask", self.values, *sizes)

    def aligned(self, batch_ndim):
        return Dense(tiles.with_heads(self.values, batch_ndim))

    def aligned_tile(self, rows, columns):
        return tiles.rectangle(self.values, rows, columns)

    def at_head(self, example, head):
        return Dense(tiles.at_batch(self.values, (*example, head))[None])


def _hull(seen: Array) -> tuple[Array, Array] | None:
    """Finds (start, stop) of the keys `[B..., S]` that are seen in any example."""
    # None where it is not known, as one entry stands for all keys.
    num_keys = seen.shape[-1]
    if num_keys == 1:
        return None
    seen = seen.reshape(-1, num_keys).any(0)
    stop = jnp.max(jnp.where(seen, jnp.arange(1, num_keys + 1), 0), initial=0)
    start = jnp.min(jnp.where(seen, jnp.arange(num_keys), stop), initial=num_keys)
    return start, stop


def _within(hull: tuple | None, keys: algebra.Range) -> algebra.Range:
    return keys if hull is None else algebra.overlap(hull, keys)
