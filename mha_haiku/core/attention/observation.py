"""Observations of a map, computed tile by tile without any `[T, S]` array.

An observation defines its initial sums and what a tile adds to them; `tiled` has the
walk that runs it, and its gradient.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku.core import tiles

Array = jax.Array
Tree = Any  # a pytree of arrays


class Sums(NamedTuple):
    """The sums of an observation; pytrees of arrays, any of which may be empty."""

    # `[T, ...]`, `[R, ...]` in a block: for each query, over the keys.
    queries: Tree = ()
    keys: Tree = ()  # `[S, ...]`, `[C, ...]` in a tile: for each key, over the queries
    head: Tree = ()  # for the whole head, over both; any shape


class Given(NamedTuple):
    """Arrays that an observation needs; pytrees."""

    # `[B..., T, H, ...]`, where B... and H may have size 1 to broadcast. In a tile
    # `[R, ...]`.
    queries: Tree = ()
    keys: Tree = ()  # `[B..., S, H, ...]`, as for queries; `[C, ...]` in a tile


NOTHING_GIVEN = Given()


class Tile(NamedTuple):
    """A tile of one head of one example."""

    # `[R, C]`. Queries already counted by an earlier block have weights of 0.
    weights: Array
    log_weights: Array  # their logarithms, finite and very low where weights are 0
    rows: tiles.Span  # the queries, as positions in the map
    columns: tiles.Span  # the keys, as positions in the map
    given: Given  # the arrays of these queries and keys
    # Scores less the log sum of their row, -inf where masked; they rise with weights.
    relative_scores: Array


class Observation(abc.ABC):
    """A measurement of a map; a frozen dataclass whose fields are static."""

    @abc.abstractmethod
    def nothing(
        self, num_queries: int, num_keys: int, given: Given, dtype: jnp.dtype
    ) -> Sums:
        """Makes the initial sums of R queries, S keys and a head."""

    @abc.abstractmethod
    def add(self, tile: Tile, sums: Sums) -> Sums:
        """Adds a tile to the sums of its queries, its keys and the head.

        It must add 0 where weights are 0: tiles that the mask rules out are skipped,
        and tiles may repeat rows and columns, then with weights of 0. Only additions to
        the sums are differentiated; any other update (the largest so far) must use
        `lax.stop_gradient(tile.weights)`.
        """

    def merge(self, first: Tree, second: Tree) -> Tree:
        """Merges the sums of queries over the keys of two devices."""
        return jax.tree.map(jnp.add, first, second)


class Top(NamedTuple):
    """The largest weights of each row."""

    # `[B..., H, T, k]`, in decreasing order; 0 where a row sees fewer keys; NaN,
    # without positions, where it is NaN.
    weights: Array
    # `[B..., H, T, k]` integers, their keys; -1 where a row sees fewer.
    positions: Array
