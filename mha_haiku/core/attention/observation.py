"""What can be measured of a map tile by tile: statistics, and observations in general.

An observation defines its initial sums and what a tile adds to them, without any
`[T, S]` array; `tiled` has the walk that runs it, and its gradient. A statistic of a
head is one entry of `STATISTICS` in `statistics.py`, which makes it an attribute of
`Statistics` and a column of tables, CSV files, pages and notebooks. All statistics are
computed by one observation.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import tiles

Tree = Any  # a pytree of arrays


class Sums(NamedTuple):
    """The sums of an observation; pytrees of arrays, any of which may be empty."""

    # `[T, ...]`, `[R, ...]` in a block: for each query, over the keys.
    queries: Tree = ()
    keys: Tree = ()  # `[S, ...]`, `[C, ...]` in a tile: for each key, over the queries
    head: Tree = ()  # for the whole head, over both; any shape


class SideArrays(NamedTuple):
    """Arrays along the sides of a map that an observation reads; pytrees."""

    # `[B..., T, H, ...]`, where B... and H may have size 1 to broadcast. In a tile
    # `[R, ...]`.
    queries: Tree = ()
    keys: Tree = ()  # `[B..., S, H, ...]`, as for queries; `[C, ...]` in a tile


NO_ARRAYS = SideArrays()


class Tile(NamedTuple):
    """A tile of one head of one example.

    It does not know S; `Statistic.from_head` does, from `HeadSums.received`.
    """

    # `[R, C]`, 0 where masked. Queries already counted by an earlier block have weights
    # of 0.
    weights: Array
    log_weights: Array  # their logarithms, finite and very low where weights are 0
    rows: tiles.Span  # the queries: positions in the map, start, stop, size, array()
    columns: tiles.Span  # the keys, as positions in the map
    # The arrays of these queries and keys. Statistics get dicts, with entries of tokens
    # and of chosen positions where `AttentionMap.statistics` got `tokens=` and
    # `positions=`: `queries["position"]` `[R]`, where each query is among the keys,
    # which with `first_query`, or in a part of a sequence, is not `rows.array()`;
    # `queries["tokens"]` `[R]` and `keys["tokens"]` `[C]`; `keys["preceding"]` `[C]`,
    # the token before each key; and `keys["is_first"]`, of the first position, and
    # `keys["positions"]`, `[C]` booleans.
    arrays: SideArrays
    # Scores less the log sum of their row, -inf where masked; they rise with weights.
    relative_scores: Array


class Observation(abc.ABC):
    """A measurement of a map; a frozen dataclass whose fields are static."""

    @abc.abstractmethod
    def init(
        self, num_queries: int, num_keys: int, arrays: SideArrays, dtype: jnp.dtype
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


class RowSum(NamedTuple):
    """A sum over the keys of each query."""

    # `from_tile(tile, *products)` returns what a tile adds, `[R]`; with `size=n` a
    # tuple of n such arrays. It must be 0 where weights are 0, because tiles may be
    # skipped or overlap. There is one product `[R]` per function in `of_keys`.
    from_tile: Callable[..., Any]
    # Functions of a tile that return a number for each of its keys, `[C]`. The product
    # is the sum of these numbers, weighted by the query's weights. The products of all
    # statistics are computed as one matrix product, so they are nearly free.
    of_keys: tuple[Callable[[Tile], Array], ...] = ()
    # The number of sums, which `Statistic.from_sums` gets as a tuple; None for one sum,
    # without a tuple.
    size: int | None = None
    # Combine tiles by maximum instead of sum. That has no gradient, except for
    # `LARGEST`, which `statistics` gives one.
    is_largest: bool = False


def weighted_sum(of_keys: Callable[[Tile], Array]) -> RowSum:
    """Makes the weighted sum over keys of a number per key."""
    return RowSum(lambda tile, product: product, (of_keys,))


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number per query, and from these a number per head; or a number per head."""

    name: str  # its name in `Statistics`
    unit: str  # the unit it is measured in
    label: str  # its meaning, for tables and figures
    # The sums over tiles it is computed from; without any, from the largest scores.
    sums: tuple[RowSum, ...] = ()
    # From these sums, `[..., T]`, to the statistic of each query.
    from_sums: Callable[..., Array] = lambda x: x
    # A head has the largest number of its queries, instead of their mean.
    is_largest: bool = False
    # From the mean over queries to the statistic of the head.
    from_mean: Callable[[Array], Array] = lambda x: x
    # The argument of `AttentionMap.statistics` that it requires, or "scores", if any.
    needs: str | None = None
    source: str = ""  # the reference
    # Instead of the above, for a number per head, `[B..., H]`, that is not a mean.
    from_head: Callable[["HeadSums"], Array] | None = None


class HeadSums(NamedTuple):
    """The sums from which statistics of whole heads are computed."""

    counts: Array  # `[B..., H, T]` booleans, the queries that count
    received: Array  # `[B..., H, S]`, the mass that each key receives
    # Booleans `[B..., H, S]`, the keys that no query may see; None if there are none.
    unseen: Array | None
