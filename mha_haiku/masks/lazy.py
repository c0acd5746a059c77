"""What every mask can be asked: tiles of itself, what they leave out, what is unseen.

`B...` are the batch axes, T query positions, S key positions, H query heads. A mask
never holds a T x S array unless it was made from one. The ranks of the arrays inside
decide their meaning: lengths are `[B...]`, segment ids `[B..., S]`, and so on.
"""

import abc
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku import tiles

Array = jax.Array
_BLOCK = 1024  # queries that a sweep over a mask looks at together


class LazyMask(abc.ABC):
    """A boolean matrix that gives any rectangle of itself; see `algebra.Mask`."""

    def array(self, num_queries: int, num_keys: int) -> Array:
        """Returns the whole mask: boolean `[B..., T, S]`, or `[B..., H, T, S]`."""
        self.check_lengths(num_keys)
        return self.tile(range(num_queries), range(num_keys))

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

    def is_lopsided(self) -> bool:
        """Returns whether later queries see more keys, or fewer, than earlier ones."""
        return False

    def of_head(self, example: tuple, head: Array) -> Self:
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
        seen = self._any_in_blocks(-2, num_queries, num_keys, batch_ndim)
        return ~seen.any(0)

    def aligned_blind_queries(self, num_queries, num_keys, batch_ndim) -> Array | None:
        """Returns `[B..., H, T]`, or None where surely every query sees a key."""
        seeing = self._any_in_blocks(-1, num_queries, num_keys, batch_ndim)
        seeing = jnp.moveaxis(seeing, 0, -2)
        return ~lax.collapse(seeing, seeing.ndim - 2)[..., :num_queries]

    def _any_in_blocks(self, axis, num_queries, num_keys, batch_ndim) -> Array:
        """Returns whether there is any pair along an axis of the tile of a block.

        Returns:
          `[blocks, B..., H, ...]`; the last block of queries repeats the last query.
        """
        columns = jnp.arange(num_keys)

        def of_block(rows):
            return self.aligned_tile(rows, columns, batch_ndim).any(axis)

        if num_queries <= _BLOCK:
            return of_block(jnp.arange(num_queries))[None]
        blocks = -(-num_queries // _BLOCK)
        rows = jnp.minimum(jnp.arange(blocks * _BLOCK), num_queries - 1)
        return lax.map(of_block, rows.reshape(blocks, _BLOCK))

    def _without_heads(self, aligned: Array, batch_ndim: int, sizes: tuple) -> Array:
        """Broadcasts the position axes; drops the head axis where heads are alike."""
        aligned = jnp.broadcast_to(aligned, aligned.shape[: batch_ndim + 1] + sizes)
        return aligned if self.has_heads(batch_ndim) else aligned.squeeze(batch_ndim)
