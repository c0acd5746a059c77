"""The interface of masks, and their algebra.

A mask never stores a T x S array unless it was made from one, but computes any
rectangle of itself. Its arguments are absolute positions of queries and keys: tiles,
the parts of a device and decoding steps differ only in these positions, which also
index the arrays inside a mask. The ranks of these arrays decide their meaning: lengths
are `[B...]`, segment ids `[B..., S]`, and so on.
"""

import abc
import dataclasses
import types
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from mha_haiku.core import display, tiles

Range = tuple[int | Array, int | Array]  # (start, stop)


def overlap(first: Range, second: Range) -> Range:
    """Returns the overlap of two ranges; if empty, an empty range inside the second."""
    start = tiles.smallest(tiles.largest(first[0], second[0]), second[1])
    return start, tiles.largest(tiles.smallest(first[1], second[1]), start)


class Mask(tiles.Part, abc.ABC):
    """A mask: which query may attend to which key; True means "may attend".

    Masks are pytrees whose lengths and ids are leaves and whose structure is static, so
    they pass through jit, vmap, pmap and scan. `&`, `|` and `~` combine them. Their
    `repr` is the expression that makes them.

    A custom mask is a function of positions, see `where`, or a class such as the
    following, in which a query sees the keys of its color; `tiles` indexes arrays by
    positions:

        from mha_haiku import attend
        from mha_haiku.core import tiles
        from mha_haiku.core.masks import Mask, causal

        @tiles.pytree
        class SameColor(Mask):
            colors: jax.Array = tiles.array("S")  # [B..., S]

            def aligned_tile(self, rows, columns):
                of_queries = tiles.take(self.colors, rows, axis=-1)
                of_keys = tiles.take(self.colors, columns, axis=-1)
                return of_queries[..., None, :, None] == of_keys[..., None, None, :]

        attend(query, key, value, mask=causal() & SameColor(colors))

    Only `aligned_tile` is required; arrays are checked against the axes that their
    fields declare. Also worth implementing: `key_range`, so that tiles are skipped;
    `unseen_keys` and `fully_masked`, which every call of `MultiHeadAttention` uses, and
    whose defaults evaluate all T x S positions.

    Example:
      >>> mask = mh.masks.causal() & ~mh.masks.window(0, 0)  # before the query
      >>> np.array(mask.tile(range(3), range(3)), int)
      array([[0, 0, 0],
             [1, 0, 0],
             [1, 1, 0]])
    """

    _repr_html_ = display.html

    def __repr__(self):
        return display.record(self)

    @property
    def block(self) -> int:
        """The number of queries per block when a whole mask is evaluated."""
        return 1024

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(Intersection, self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(Union, self, other)

    def __invert__(self) -> "Mask":
        return Complement(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false: combine masks with & | ~, which `and`, "
            "`or` and `not` cannot do."
        )

    def array(self, num_queries: int, num_keys: int) -> Array:
        """Computes the whole mask: boolean `[B..., T, S]`, or `[B..., H, T, S]`."""
        self.check_lengths(num_keys)
        return self.tile(range(num_queries), range(num_keys))

    def tile(self, rows: tiles.Index, columns: tiles.Index) -> Array:
        """Computes a rectangle, at slices with an end, ranges or arrays of integers."""
        rows, columns = tiles.positions(rows), tiles.positions(columns)
        batch_ndim = self.batch_ndim()
        aligned = self.aligned(batch_ndim)
        tile = tiles.lifted(aligned.aligned_tile(rows, columns), batch_ndim + 3)
        shape = tile.shape[: batch_ndim + 1] + (len(rows), len(columns))
        tile = jnp.broadcast_to(tile, shape)
        return tile if aligned.has_heads() else tile.squeeze(batch_ndim)

    def key_range(self, rows: Range, keys: Range) -> Range:
        """Returns (start, stop) of the `keys` that the queries `rows` may see.

        They are Python integers if the mask and the ranges are static.
        """
        del rows
        return keys

    def open_range(self, rows: Range, keys: Range) -> Range:
        """Finds (start, stop) of keys that all of the queries are known to see."""
        del rows
        return keys[0], keys[0]

    def at_head(self, example: tuple, head: int | Array) -> Self:
        """Selects one head of one example of an aligned mask, without batch axes."""
        del head
        return jax.tree.map(lambda x: tiles.at_batch(x, example), self)

    def check(
        self, batch_shape: tuple, num_heads: int, num_queries: int | None, num_keys: int
    ) -> None:
        """Raises ValueError if the mask does not fit attention of these sizes.

        `num_queries` is the position after the last query, which is T if the first is
        at 0, or None if it is not known.
        """
        self.check_shape(batch_shape, num_heads, num_queries, num_keys)
        self.check_lengths(num_keys)

    def batch_ndim(self) -> int:
        """Infers the number of batch axes from the ranks of the mask's arrays."""
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

    # Methods for subclasses to implement. Arrays of an aligned mask have all batch axes
    # in front, of size 1 if they do not vary; aligning twice changes nothing. An
    # aligned mask returns arrays that broadcast to `[B..., H, ...]`.

    @abc.abstractmethod
    def aligned_tile(
        self, rows: tiles.Positions, columns: tiles.Positions
    ) -> Bool[Array, "..."]:
        """Computes an aligned mask at R x C positions; it fits `[B..., H, R, C]`.

        `tiles.on_rows`, `on_columns`, `take` and `as_array` accept arrays and spans.
        """

    def aligned(self, batch_ndim: int) -> Self:
        """Aligns the mask: its arrays get `batch_ndim` batch axes, and one of heads."""
        del batch_ndim
        return self

    def batch_ranks(self) -> tuple[int, ...] | None:
        """Lists the possible numbers of batch axes, likeliest first, or None if any."""
        for name, axes in self._own_axes().items():
            return (jnp.ndim(getattr(self, name)) - len(axes),)
        return None

    def has_heads(self) -> bool:
        """Checks whether the heads of an aligned mask may differ."""
        return False

    def check_shape(
        self, batch_shape: tuple, num_heads: int, num_queries: int | None, num_keys: int
    ) -> None:
        """Raises ValueError if an array lacks the axes that its field declares."""
        sizes = {"H": num_heads, "T": num_queries, "S": num_keys}
        for name, axes in self._own_axes().items():
            full_shape = (*batch_shape, *map(sizes.get, axes))
            described = f"[{', '.join(('B...', *axes))}]"
            tiles.check_axes(name, getattr(self, name), full_shape, described)

    def check_lengths(self, num_keys: int) -> None:
        """Raises ValueError if a known length exceeds `num_keys`."""

    def unseen_keys(
        self,
        num_queries: int,
        num_keys: int,
        first_query: int | Array = 0,
        first_key: int | Array = 0,
    ) -> Array | None:
        """Finds the keys that no query sees; call it on an aligned mask.

        They are booleans that broadcast to `[B..., H, S]`, or None if every key is
        known to be seen. Queries start at position `first_query`, keys at `first_key`.
        """
        at = tiles.Origin(first_query, first_key)
        seen = self._by_block(num_queries, num_keys, at, lambda x: x.any(-2))
        return ~seen.any(0)

    def first_key(self) -> Array | int:
        """Finds the position of the first key that is no padding, `[B...]`, or 0."""
        return 0

    def fully_masked(
        self, num_queries: int, num_keys: int, first_query: int | Array = 0
    ) -> Array | np.ndarray | None:
        """Finds the queries that see no key, `[B..., H, T]`, like `unseen_keys`."""
        at = tiles.Origin(first_query)
        return ~self._by_query(num_queries, num_keys, at, lambda x: x.any(-1))

    def key_counts(
        self, num_queries: int, num_keys: int, origin: tiles.Origin
    ) -> Array:
        """Counts the keys that each query sees, `[B..., H, T]`; for an aligned mask."""
        return self._by_query(num_queries, num_keys, origin, lambda x: x.sum(-1))

    def _by_block(
        self, num_queries: int, num_keys: int, origin: tiles.Origin, function: Callable
    ) -> Array:
        # Calls `function` with tiles `[..., R, S]` of blocks of queries, and stacks;
        # the last block repeats the last query.
        columns = origin.columns(jnp.arange(num_keys))

        def of_block(rows: Array | np.ndarray) -> Array:
            rows = origin.rows(rows)
            tile = self.aligned_tile(rows, columns)
            shape = *tile.shape[:-2], len(rows), num_keys
            return function(jnp.broadcast_to(tile, shape))

        if num_queries <= self.block:
            return of_block(jnp.arange(num_queries))[None]
        count = -(-num_queries // self.block)
        queries = jnp.minimum(jnp.arange(count * self.block), num_queries - 1)
        return lax.map(of_block, queries.reshape(count, self.block))

    def _by_query(
        self, num_queries: int, num_keys: int, origin: tiles.Origin, function: Callable
    ) -> Array:
        """Applies a function to tiles, and joins the results to `[..., T]`."""
        stacked = self._by_block(num_queries, num_keys, origin, function)
        joined = jnp.moveaxis(stacked, 0, -2)
        return lax.collapse(joined, joined.ndim - 2)[..., :num_queries]


@tiles.pytree
class Full(Mask):
    """The mask by which every query may attend to every key.

    Example:
      >>> mh.masks.full() & mh.masks.causal()
      causal()
    """

    def __repr__(self):
        return "full()"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        return jnp.ones((len(rows), len(columns)), bool)

    def open_range(self, rows: Range, keys: Range) -> Range:
        return keys

    def unseen_keys(self, *sizes: Any) -> None:
        return None

    def fully_masked(self, *sizes: Any) -> None:
        return None


class _Compound(Mask):
    """A mask made of other masks, which answer all but its tiles and ranges."""

    @property
    def block(self) -> int:
        return min(part.block for part in self._parts().values())

    def batch_ranks(self):
        ranks = [part.batch_ranks() for part in self._parts().values()]
        fixed_ranks = [rank for rank in ranks if rank is not None]
        if not fixed_ranks:
            return None
        first, *others = fixed_ranks
        return tuple(n for n in first if all(n in other for other in others))

    def has_heads(self):
        return any(part.has_heads() for part in self._parts().values())

    def aligned(self, batch_ndim: int) -> Self:
        return self._of_parts(lambda mask: mask.aligned(batch_ndim))

    def axes(self):
        return self._of_parts(lambda mask: mask.axes())

    def at_head(self, example: tuple, head: int | Array) -> Self:
        return self._of_parts(lambda mask: mask.at_head(example, head))

    def check_shape(self, *sizes: Any):
        for part in self._parts().values():
            part.check_shape(*sizes)

    def check_lengths(self, num_keys: int):
        for part in self._parts().values():
            part.check_lengths(num_keys)

    def _parts(self) -> dict[str, Mask]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Mask)}

    def _of_parts(self, function: Callable[[Mask], Mask]) -> Self:
        changed = {name: function(part) for name, part in self._parts().items()}
        return dataclasses.replace(self, **changed)

    def _tiles(
        self, rows: tiles.Positions, columns: tiles.Positions
    ) -> tuple[Array, ...]:
        parts = [x.aligned_tile(rows, columns) for x in self._parts().values()]
        ndim = max(part.ndim for part in parts)
        return tuple(tiles.lifted(part, ndim) for part in parts)


@tiles.pytree
class Intersection(_Compound):
    """The pairs that both masks allow."""

    left: Mask
    right: Mask

    def __repr__(self):
        return f"{_within(self.left, Union)} & {_within(self.right, Union)}"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        left, right = self._tiles(rows, columns)
        return left & right

    def key_range(self, rows: Range, keys: Range) -> Range:
        return overlap(*(x.key_range(rows, keys) for x in (self.left, self.right)))

    def open_range(self, rows: Range, keys: Range) -> Range:
        return overlap(*(x.open_range(rows, keys) for x in (self.left, self.right)))

    def first_key(self) -> Array | int:
        return jnp.maximum(self.left.first_key(), self.right.first_key())


@tiles.pytree
class Union(_Compound):
    """The pairs that either mask allows."""

    left: Mask
    right: Mask

    def __repr__(self):
        return f"{self.left!r} | {self.right!r}"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        left, right = self._tiles(rows, columns)
        return left | right

    def key_range(self, rows: Range, keys: Range) -> Range:
        left, right = (x.key_range(rows, keys) for x in (self.left, self.right))
        return tiles.smallest(left[0], right[0]), tiles.largest(left[1], right[1])

    def open_range(self, rows: Range, keys: Range) -> Range:
        left, right = (x.open_range(rows, keys) for x in (self.left, self.right))
        is_left = left[1] - left[0] >= right[1] - right[0]
        if isinstance(is_left, bool):
            return left if is_left else right
        first, last = zip(left, right, strict=True)
        return jnp.where(is_left, *first), jnp.where(is_left, *last)


@tiles.pytree
class Complement(_Compound):
    """The pairs that the mask forbids."""

    mask: Mask

    def __repr__(self):
        return f"~{_within(self.mask, Intersection | Union)}"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        return ~self.mask.aligned_tile(rows, columns)


def _within(mask: Mask, looser: type | types.UnionType) -> str:
    """Formats a mask inside another mask's expression, in brackets if needed."""
    return f"({mask!r})" if isinstance(mask, looser) else repr(mask)


def _combine(kind: type[Intersection] | type[Union], left: Mask, right: Mask) -> Mask:
    if not isinstance(right, Mask):
        raise TypeError(
            f"a mask combines with masks only, got {type(right).__name__}; "
            "masks.dense(array) makes a mask of an array."
        )
    if kind is Intersection:  # drops Full, to keep what is known of the other mask
        if isinstance(left, Full):
            return right
        if isinstance(right, Full):
            return left
    return kind(left, right)
