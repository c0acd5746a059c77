"""Masks made of lengths: the first keys of each example, or of each query."""

import jax
import jax.numpy as jnp

from mha_haiku.core import display, tiles
from mha_haiku.core.masks import algebra, relative

Array = jax.Array
Mask = algebra.Mask


def padding(lengths: Array, query_lengths: Array | None = None) -> Mask:
    """Makes the mask of each example's first keys, for its first queries.

    Args:
      lengths: `[B...]` integers in 0..S.
      query_lengths: `[B...]` integers of at least 0; later queries see nothing. None:
        all queries see.

    Raises:
      ValueError: If lengths are no integers of at least 0, or disagree on batch axes.
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


def valid_lens(lengths: Array) -> Mask:
    """Returns the mask of the first keys: `[B...]`, or `[B..., T]` per query."""
    return ValidLens(tiles.integers("lengths", lengths))


def prefix(lengths: Array) -> Mask:
    """Makes the causal mask whose first `lengths` `[B...]` keys every query sees.

    Source: Raffel et al. 2020 (T5), figure 4, https://arxiv.org/abs/1910.10683.
    """
    return relative.causal() | padding(lengths)


class _Lengths(Mask):
    lengths: Array

    def check_lengths(self, num_keys):
        known = tiles.known(self.lengths)
        if known is not None and (known > num_keys).any():
            raise ValueError(
                f"lengths must be in 0..S = 0..{num_keys}, got {known.max()}."
            )

    def key_range(self, rows, keys):
        longest = self._reduced(lambda lengths: lengths.max(initial=0))
        return algebra.overlap((keys[0], longest), keys)

    def open_range(self, rows, keys):
        if not jnp.size(self.lengths):
            return keys
        shortest = self._reduced(lambda lengths: lengths.min())
        return algebra.overlap((keys[0], shortest), keys)

    def _reduced(self, function) -> int | Array:
        known = tiles.known(self.lengths)
        return function(self.lengths) if known is None else int(function(known))


@tiles.pytree
class Padding(_Lengths):
    """The first keys of each example, for its first queries."""

    lengths: Array = tiles.array("")
    query_lengths: Array | None = tiles.array("")

    def __repr__(self):
        shown = [self.lengths]
        if self.query_lengths is not None:
            shown.append(self.query_lengths)
        return f"padding({', '.join(map(display.numbers, shown))})"

    def aligned_tile(self, rows, columns):
        lengths = jnp.asarray(self.lengths)[..., None, None, None]
        seen = tiles.lifted(tiles.on_columns(columns), lengths.ndim) < lengths
        if self.query_lengths is None:
            return seen
        lengths = jnp.asarray(self.query_lengths)[..., None, None, None]
        return seen & (tiles.lifted(tiles.on_rows(rows), lengths.ndim) < lengths)

    def open_range(self, rows, keys):
        start, stop = super().open_range(rows, keys)
        if self.query_lengths is None:
            return start, stop
        return start, jnp.where(rows[1] <= jnp.min(self.query_lengths), stop, start)

    def unseen_keys(self, num_queries, num_keys, first_query=0):
        keys = tiles.lifted(jnp.arange(num_keys), jnp.ndim(self.lengths) + 2)
        unseen = (keys >= self.lengths[..., None, None]) | (num_queries == 0)
        if self.query_lengths is None:
            return unseen
        return unseen | (self.query_lengths <= first_query)[..., None, None]

    def fully_masked(self, num_queries, num_keys, first_query=0):
        queries = first_query + jnp.arange(num_queries)
        queries = tiles.lifted(queries, jnp.ndim(self.lengths) + 2)
        # Always true, `queries >= first_query` gives the axis of queries its size.
        masked = (self.lengths <= 0)[..., None, None] & (queries >= first_query)
        if self.query_lengths is None:
            return masked
        return masked | (queries >= self.query_lengths[..., None, None])


@tiles.pytree
class ValidLens(_Lengths):
    """The first keys of each example or of each query."""

    lengths: Array = tiles.array("T")

    def __repr__(self):
        return f"valid_lens({display.numbers(self.lengths)})"

    def batch_ranks(self):
        rank = jnp.ndim(self.lengths)
        return {0: (0,), 1: (1, 0)}.get(rank, (rank - 1, rank))

    def check_shape(self, batch_shape, num_heads, num_queries, num_keys):
        wanted = batch_shape
        if jnp.ndim(self.lengths) == len(batch_shape) + 1:
            wanted = (*batch_shape, num_queries)
        tiles.check_axes("lengths", self.lengths, wanted, "[B...] or [B..., T]")

    def aligned(self, batch_ndim):
        is_aligned = jnp.ndim(self.lengths) > batch_ndim
        return self if is_aligned else ValidLens(jnp.asarray(self.lengths)[..., None])

    def aligned_tile(self, rows, columns):
        lengths = tiles.take(self.lengths, rows, axis=-1)[..., None, :, None]
        return tiles.lifted(tiles.on_columns(columns), lengths.ndim) < lengths
