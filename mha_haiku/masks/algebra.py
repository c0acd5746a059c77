"""What every mask can do: give tiles of itself, combine, say what is unseen.

`B...` are the batch axes, T query positions, S key positions, H query heads. A mask
never holds a T x S array unless it was made from one. The ranks of the arrays inside
decide their meaning: lengths are `[B...]`, segment ids `[B..., S]`, and so on.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku import tiles

Array = jax.Array
_BLOCK = 1024  # queries that a sweep over a mask looks at together


class Mask(abc.ABC):
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

    def array(self, num_queries: int, num_keys: int) -> Array:
        """Returns the whole mask: boolean `[B..., T, S]`, or `[B..., H, T, S]`."""
        rows, columns = np.arange(num_queries), np.arange(num_keys)
        batch_ndim = self.batch_ndim()
        self.check_lengths(num_keys)
        shape = (num_queries, num_keys)
        return self._without_heads(
            self.aligned_tile(rows, columns, batch_ndim), batch_ndim, shape
        )

    def tile(self, rows: tiles.Index, columns: tiles.Index) -> Array:
        """Returns the rectangle `rows` x `columns` of the mask, as `array` shapes it.

        Args:
          rows: Query positions: a slice with an end, a range or an array of integers.
          columns: Key positions, likewise.
        """
        rows, columns = tiles.positions(rows), tiles.positions(columns)
        batch_ndim = self.batch_ndim()
        shape = (len(rows), len(columns))
        return self._without_heads(
            self.aligned_tile(rows, columns, batch_ndim), batch_ndim, shape
        )

    def key_range(self, rows: tuple, num_keys: int) -> tuple:
        """Returns (start, stop) of the keys that the queries `rows` can see at all.

        Keys outside are masked for all these queries; keys inside may be. The ends are
        Python integers where the mask is static, else scalar arrays.

        Args:
          rows: (start, stop) of the queries; integers or scalar arrays.
          num_keys: S.
        """
        del rows
        return 0, num_keys

    def open_range(self, rows: tuple, num_keys: int) -> tuple:
        """Returns (start, stop) of keys that surely all of the queries `rows` can see.

        Args:
          rows: (start, stop) of the queries; integers or scalar arrays.
          num_keys: S.
        """
        del rows, num_keys
        return 0, 0

    def of_head(self, example: tuple, head: Array) -> "Mask":
        """Returns the mask of one head of one example, without batch axes.

        Args:
          example: An index per batch axis; may be traced.
          head: The index of the head, likewise.
        """
        del head
        return jax.tree.map(lambda x: tiles.at_batch(x, example), self)

    def unseen_keys(self, num_queries: int, num_keys: int) -> Array:
        """Returns which keys no query may attend to: boolean `[B..., (H,) S]`."""
        batch_ndim = self.batch_ndim()
        unseen = self.aligned_unseen_keys(num_queries, num_keys, batch_ndim)
        if unseen is None:
            unseen = jnp.full((1,) * (batch_ndim + 1) + (num_keys,), not num_queries)
        return self._without_heads(unseen, batch_ndim, (num_keys,))

    def blind_queries(self, num_queries: int, num_keys: int) -> Array:
        """Returns which queries may attend to no key: boolean `[B..., (H,) T]`."""
        batch_ndim = self.batch_ndim()
        blind = self.aligned_blind_queries(num_queries, num_keys, batch_ndim)
        if blind is None:
            blind = jnp.full((1,) * (batch_ndim + 1) + (num_queries,), not num_keys)
        return self._without_heads(blind, batch_ndim, (num_queries,))

    def check(
        self, batch_shape: tuple, num_heads: int, num_queries: int, num_keys: int
    ):
        """Raises ValueError where the mask does not fit attention of these sizes."""
        self.check_shape(batch_shape, num_heads, num_queries, num_keys)
        self.check_lengths(num_keys)

    def batch_ndim(self) -> int:
        """Returns the number of batch axes that the ranks of its arrays imply."""
        ranks = self.batch_ranks()
        if ranks is None:
            return 0
        if not ranks:
            raise ValueError(
                "the parts of this mask disagree on the number of batch axes: "
                f"{self}; lengths are [B...], segment ids [B..., S] and arrays "
                "[B..., T, S] or [B..., H, T, S]."
            )
        return ranks[0]

    # What a kind of mask has to say of itself. "aligned" arrays have the axes
    # [B..., H, ...], each of its full size or of size 1.

    @abc.abstractmethod
    def aligned_tile(self, rows: Array, columns: Array, batch_ndim: int) -> Array:
        """Returns the mask at positions `rows` x `columns` as `[B..., H, R, C]`."""

    def batch_ranks(self) -> tuple[int, ...] | None:
        """Returns the possible numbers of batch axes, likeliest first; None: any."""
        return None

    def has_heads(self, batch_ndim: int) -> bool:
        """Returns whether the heads may differ."""
        del batch_ndim
        return False

    def check_shape(self, batch_shape, num_heads, num_queries, num_keys):
        """Raises ValueError where an array inside does not fit these sizes."""

    def check_lengths(self, num_keys: int):
        """Raises ValueError where a length, as far as known, exceeds `num_keys`."""

    def aligned_unseen_keys(self, num_queries, num_keys, batch_ndim) -> Array | None:
        """Returns `[B..., H, S]`, or None where surely every key is seen."""

        def seen_in_block(start):
            rows = jnp.minimum(
                start + jnp.arange(min(_BLOCK, num_queries)), num_queries - 1
            )
            return self.aligned_tile(rows, columns, batch_ndim).any(-2)

        columns = jnp.arange(num_keys)
        if num_queries <= _BLOCK:
            return ~self.aligned_tile(jnp.arange(num_queries), columns, batch_ndim).any(
                -2
            )
        return ~lax.map(seen_in_block, jnp.arange(0, num_queries, _BLOCK)).any(0)

    def aligned_blind_queries(self, num_queries, num_keys, batch_ndim) -> Array | None:
        """Returns `[B..., H, T]`, or None where surely every query sees a key."""

        def seeing_in_block(start):
            rows = jnp.minimum(start + jnp.arange(_BLOCK), num_queries - 1)
            return self.aligned_tile(rows, columns, batch_ndim).any(-1)

        columns = jnp.arange(num_keys)
        if num_queries <= _BLOCK:
            return ~self.aligned_tile(jnp.arange(num_queries), columns, batch_ndim).any(
                -1
            )
        seeing = lax.map(seeing_in_block, jnp.arange(0, num_queries, _BLOCK))
        seeing = jnp.moveaxis(seeing, 0, -2)
        return ~seeing.reshape(*seeing.shape[:-2], -1)[..., :num_queries]

    def _without_heads(self, aligned: Array, batch_ndim: int, sizes: tuple) -> Array:
        """Broadcasts the position axes; drops the head axis where heads are alike."""
        aligned = jnp.broadcast_to(aligned, aligned.shape[: batch_ndim + 1] + sizes)
        return aligned if self.has_heads(batch_ndim) else aligned.squeeze(batch_ndim)


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
