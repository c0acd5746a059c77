"""Masks that depend only on positions."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_haiku.core import checks, tiles
from mha_haiku.core.masks import algebra

Mask = algebra.Mask


def full() -> Mask:
    """Makes the mask that allows everything.

    Example:
      >>> np.array(mh.masks.full().tile([0], range(3)), int)
      array([[1, 1, 1]])
    """
    return algebra.Full()


def causal() -> Mask:
    """Makes the mask of positions up to the position of the query.

    Example:
      >>> np.array(mh.masks.causal().tile(range(3), range(3)), int)
      array([[1, 0, 0],
             [1, 1, 0],
             [1, 1, 1]])
    """
    return Band(None, 0)


def window(left: int | None, right: int | None) -> Mask:
    """Makes the mask of positions t - `left` to t + `right`; None is unbounded.

    Example:
      >>> np.array(mh.masks.window(1, 0).tile(range(3), range(3)), int)
      array([[1, 0, 0],
             [1, 1, 0],
             [0, 1, 1]])
    """
    for name, reach in (("left", left), ("right", right)):
        if reach is not None:
            checks.non_negative_integer(name, reach)
    return full() if left is None and right is None else Band(left, right)


def where(function: Callable[[Array, Array], Array]) -> Mask:
    """Makes a mask from a function of positions: `where(lambda t, s: s % 4 <= t)`.

    The function gets int32 positions of queries `[R, 1]` and of keys `[1, C]`, and
    returns booleans `[R, C]`: whether the query may see the key. It is called for
    arbitrary tiles, so it must be pure and accept any positions.

    Raises:
      TypeError: If `function` is not a function.

    Example:
      >>> mask = mh.masks.where(lambda t, s: s % 2 == t % 2)
      >>> np.array(mask.tile([1], range(4)), int)
      array([[0, 1, 0, 1]])
    """
    if not callable(function):
        raise TypeError(
            f"function must be a function of positions, got {checks.shown(function)}."
        )
    return Where(function)


@tiles.pytree
class Band(Mask):
    """Keys from t - left to t + right."""

    left: int | None = tiles.static()
    right: int | None = tiles.static()

    def __repr__(self):
        is_causal = self.left is None and self.right == 0
        return "causal()" if is_causal else f"window({self.left}, {self.right})"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        distance = tiles.on_columns(columns) - tiles.on_rows(rows)
        if self.left is None:
            assert self.right is not None  # else `window` makes `full()`
            return distance <= self.right
        if self.right is None:
            return distance >= -self.left
        return (distance >= -self.left) & (distance <= self.right)

    def key_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        return self._reached(rows[0], rows[1] - 1, keys)

    def open_range(self, rows: algebra.Range, keys: algebra.Range) -> algebra.Range:
        return self._reached(rows[1] - 1, rows[0], keys)

    def _reached(
        self, leftmost: int | Array, rightmost: int | Array, keys: algebra.Range
    ) -> algebra.Range:
        """Finds the range from one query's first key to another query's last key."""
        first = keys[0] if self.left is None else leftmost - self.left
        stop = keys[1] if self.right is None else rightmost + self.right + 1
        return algebra.overlap((first, stop), keys)

    def unseen_keys(
        self,
        num_queries: int,
        num_keys: int,
        first_query: int | Array = 0,
        first_key: int | Array = 0,
    ) -> Array | np.ndarray | None:
        keys = first_key + np.arange(num_keys)
        return _alone(keys, first_query, num_queries, self.right, self.left)

    def fully_masked(
        self, num_queries: int, num_keys: int, first_query: int | Array = 0
    ) -> Array | np.ndarray | None:
        queries = first_query + np.arange(num_queries)
        return _alone(queries, 0, num_keys, self.left, self.right)


@tiles.pytree
class Where(Mask):
    """Keys for which a function of positions is true."""

    function: Callable[[Array, Array], Array] = tiles.static()

    def __repr__(self):
        return f"where({getattr(self.function, '__name__', repr(self.function))})"

    def aligned_tile(self, rows: tiles.Positions, columns: tiles.Positions) -> Array:
        rows, columns = tiles.on_rows(rows), tiles.on_columns(columns)
        allowed = jnp.asarray(self.function(rows, columns))
        shape = jnp.broadcast_shapes(rows.shape, columns.shape)
        if allowed.dtype != bool:
            raise ValueError(
                f"the function of {self} must return booleans of shape {shape}, got "
                f"{allowed.dtype}."
            )
        return jnp.broadcast_to(allowed, shape)


def _alone(
    positions: Array | np.ndarray,
    first: int | Array,
    count: int,
    back: int | None,
    ahead: int | None,
) -> Array | np.ndarray | None:
    """Finds positions that reach none of the `count` positions from `first`."""
    alone = np.full(len(positions), count == 0)
    if back is not None:
        alone = alone | (positions - back > first + count - 1)
    if ahead is not None:
        alone = alone | (positions + ahead < first)
    # None if it is known that there are no such positions.
    return None if isinstance(alone, np.ndarray) and not alone.any() else alone
