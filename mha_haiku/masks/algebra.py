"""The algebra of masks: both, either, what is forbidden, and the same further along.

`B...` are the batch axes, T query positions, S key positions, H query heads.
"""

import dataclasses

import jax.numpy as jnp

from mha_haiku import tiles
from mha_haiku.masks import lazy


class Mask(lazy.LazyMask):
    """Which query may attend to which key; True means "may attend".

    Masks are pytrees whose lengths and ids are leaves and whose structure is static, so
    they pass through jit, vmap, pmap and scan. `&`, `|` and `~` combine them.
    """

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(Intersection, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(Union, self, other)

    def __invert__(self) -> "Mask":
        return Complement(self)

    def __bool__(self):
        raise TypeError(
            "a mask is neither true nor false: combine masks with & | ~, which `and`, "
            "`or` and `not` cannot do."
        )

    def shifted(self, offset: int) -> "Mask":
        """Returns the mask in which query t stands at position t + `offset`.

        T queries that are the last T of S positions have `offset = S - T`.
        """
        return self if offset == 0 else Shifted(self, offset)


class _Pair(Mask):
    """A mask made of two."""

    left: Mask
    right: Mask

    def batch_ranks(self):
        left, right = self.left.batch_ranks(), self.right.batch_ranks()
        if left is None or right is None:
            return right if left is None else left
        return tuple(rank for rank in left if rank in right)

    def has_heads(self, batch_ndim):
        return self.left.has_heads(batch_ndim) or self.right.has_heads(batch_ndim)

    def is_lopsided(self):
        return self.left.is_lopsided() or self.right.is_lopsided()

    def of_head(self, example, head):
        left, right = (x.of_head(example, head) for x in (self.left, self.right))
        return type(self)(left, right)

    def check_shape(self, *sizes):
        self.left.check_shape(*sizes)
        self.right.check_shape(*sizes)

    def check_lengths(self, num_keys):
        self.left.check_lengths(num_keys)
        self.right.check_lengths(num_keys)


@tiles.pytree(data=("left", "right"))
class Intersection(_Pair):
    """What both masks allow."""

    left: Mask
    right: Mask

    def aligned_tile(self, rows, columns, batch_ndim):
        left = self.left.aligned_tile(rows, columns, batch_ndim)
        return left & self.right.aligned_tile(rows, columns, batch_ndim)

    def key_range(self, rows, num_keys):
        return _overlap(*(x.key_range(rows, num_keys) for x in (self.left, self.right)))

    def open_range(self, rows, num_keys):
        return _overlap(
            *(x.open_range(rows, num_keys) for x in (self.left, self.right))
        )


@tiles.pytree(data=("left", "right"))
class Union(_Pair):
    """What either mask allows."""

    left: Mask
    right: Mask

    def aligned_tile(self, rows, columns, batch_ndim):
        left = self.left.aligned_tile(rows, columns, batch_ndim)
        return left | self.right.aligned_tile(rows, columns, batch_ndim)

    def key_range(self, rows, num_keys):
        left_start, left_stop = self.left.key_range(rows, num_keys)
        right_start, right_stop = self.right.key_range(rows, num_keys)
        return tiles.smallest(left_start, right_start), tiles.largest(
            left_stop, right_stop
        )

    def open_range(self, rows, num_keys):
        left = self.left.open_range(rows, num_keys)
        right = self.right.open_range(rows, num_keys)
        is_left = left[1] - left[0] >= right[1] - right[0]
        if isinstance(is_left, bool):
            return left if is_left else right
        return tuple(
            jnp.where(is_left, *ends) for ends in zip(left, right, strict=True)
        )


class _Wrapped(Mask):
    """A mask made of another one."""

    mask: Mask

    def batch_ranks(self):
        return self.mask.batch_ranks()

    def of_head(self, example, head):
        return dataclasses.replace(self, mask=self.mask.of_head(example, head))

    def has_heads(self, batch_ndim):
        return self.mask.has_heads(batch_ndim)

    def is_lopsided(self):
        return self.mask.is_lopsided()

    def check_lengths(self, num_keys):
        self.mask.check_lengths(num_keys)


@tiles.pytree(data=("mask",))
class Complement(_Wrapped):
    """What the mask forbids."""

    mask: Mask

    def aligned_tile(self, rows, columns, batch_ndim):
        return ~self.mask.aligned_tile(rows, columns, batch_ndim)

    def check_shape(self, *sizes):
        self.mask.check_shape(*sizes)


@tiles.pytree(data=("mask",), meta=("offset",))
class Shifted(_Wrapped):
    """The mask with query t at position t + offset."""

    mask: Mask
    offset: int

    def shifted(self, offset):
        return self.mask.shifted(self.offset + offset)

    def aligned_tile(self, rows, columns, batch_ndim):
        return self.mask.aligned_tile(rows + self.offset, columns, batch_ndim)

    def key_range(self, rows, num_keys):
        start, stop = rows
        return self.mask.key_range((start + self.offset, stop + self.offset), num_keys)

    def open_range(self, rows, num_keys):
        start, stop = rows
        return self.mask.open_range((start + self.offset, stop + self.offset), num_keys)

    def check_shape(self, batch_shape, num_heads, num_queries, num_keys):
        self.mask.check_shape(
            batch_shape, num_heads, num_queries + self.offset, num_keys
        )


def _overlap(left: tuple, right: tuple) -> tuple:
    """Returns the range that two ranges share; an empty one where they do not."""
    start = tiles.largest(left[0], right[0])
    return start, tiles.largest(tiles.smallest(left[1], right[1]), start)


def _combine(kind, left: Mask, right: Mask) -> Mask:
    if not isinstance(right, Mask):
        raise TypeError(
            f"a mask combines with masks only, got {type(right).__name__}; "
            "an array becomes one by masks.dense(array)."
        )
    return kind(left, right)
