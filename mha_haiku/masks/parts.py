"""A rectangle of a mask as a mask of its own, as devices that share a sequence need."""

import jax
import jax.numpy as jnp

from mha_haiku import tiles
from mha_haiku.masks import algebra

Array = jax.Array


@tiles.pytree(data=("mask", "first_query", "first_key"), meta=("num_keys", "all_keys"))
class Part(algebra.Mask):
    """The mask from a query and a key on.

    Attributes:
      mask: The whole mask.
      first_query: `[]` integer, which query of the mask stands first.
      first_key: `[]` integer, which key does.
      num_keys: How many keys there are from there on.
      all_keys: S of the whole mask.
    """

    mask: algebra.Mask
    first_query: Array
    first_key: Array
    num_keys: int
    all_keys: int

    def batch_ranks(self):
        return self.mask.batch_ranks()

    def has_heads(self, batch_ndim):
        return self.mask.has_heads(batch_ndim)

    def of_head(self, example, head):
        whole = self.mask.of_head(example, head)
        return Part(
            whole, self.first_query, self.first_key, self.num_keys, self.all_keys
        )

    def aligned_tile(self, rows, columns, batch_ndim):
        rows, columns = rows + self.first_query, columns + self.first_key
        return self.mask.aligned_tile(rows, columns, batch_ndim)

    def key_range(self, rows, num_keys):
        del num_keys
        return self._here(self.mask.key_range(self._rows(rows), self.all_keys))

    def open_range(self, rows, num_keys):
        del num_keys
        return self._here(self.mask.open_range(self._rows(rows), self.all_keys))

    def _rows(self, rows):
        start, stop = rows
        return start + self.first_query, stop + self.first_query

    def _here(self, keys):
        start, stop = (jnp.clip(x - self.first_key, 0, self.num_keys) for x in keys)
        return start, jnp.maximum(start, stop)
