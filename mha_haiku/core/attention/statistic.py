"""The definition of a statistic of a head: row sums over tiles, and what follows.

A statistic is one entry of `STATISTICS` in `statistics.py`, which makes it an attribute
of `Statistics` and a column of tables, CSV files, pages and notebooks.

Its functions get an `observation.Tile` of one head of one example:

    weights, log_weights      [R, C]; weights are 0 where masked, log_weights finite
    rows, columns             Span: positions in the map; start, stop, size, array()
    given.queries["position"] [R], positions of the queries; with `first_query`, or in
                              a part of a sequence, not the same as rows.array()
    given.queries["tokens"]   [R], and given.keys["tokens"] [C]: token ids
    given.keys["preceding"]   [C], the token before each key
    given.keys["positions"]   [C] booleans, the chosen positions

Tokens and chosen positions exist where `AttentionMap.statistics` got `tokens=` or
`positions=`; an entry that reads them declares it in `needs`. A tile does not know S;
`from_head` does, from the shape of `HeadSums.received`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mha_haiku.core.attention import observation

Array = jax.Array


class RowSum(NamedTuple):
    """A sum over the keys of each query.

    Example:
      >>> from mha_haiku.core.attention import statistics
      >>> even = statistics.linear(lambda tile: tile.columns.array() % 2 == 0)
      >>> entry = mh.attention.Statistic("even", "share", "on even keys", (even,))
      >>> entry.sums[0].is_largest
      False
    """

    # `from_tile(tile, *products)` returns what a tile adds, `[R]`; with `size=n` a
    # tuple of n such arrays. It must be 0 where weights are 0, because tiles may be
    # skipped or overlap. There is one product `[R]` per function in `of_keys`.
    from_tile: Callable[..., Any]
    # Functions of a tile that return a number for each of its keys, `[C]`. The product
    # is the sum of these numbers, weighted by the query's weights. The products of all
    # statistics are computed as one matrix product, so they are nearly free.
    of_keys: tuple[Callable[[observation.Tile], Array], ...] = ()
    # The number of sums, which `Statistic.from_sums` gets as a tuple; None for one sum,
    # without a tuple.
    size: int | None = None
    # Combine tiles by maximum instead of sum. That has no gradient, except for
    # `LARGEST`, which `statistics` gives one.
    is_largest: bool = False


def linear(of_keys: Callable[[observation.Tile], Array]) -> RowSum:
    """Makes the weighted sum over keys of a number per key."""
    return RowSum(lambda tile, product: product, (of_keys,))


def _itself(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number per query, averaged over the queries of a head; or a number per head.

    Example:
      >>> entropy = mh.attention.STATISTICS["entropy"]
      >>> entropy.label, entropy.unit
      ("entropy of a query's weights", 'nats')
    """

    name: str  # its name in `Statistics`
    unit: str  # the unit it is measured in
    label: str  # its meaning, for tables and figures
    sums: tuple[RowSum, ...] = ()  # the sums over tiles it is computed from
    # From these sums, `[..., T]`, to the statistic of each query.
    from_sums: Callable[..., Array] = _itself
    # From the mean over queries to the statistic of the head.
    from_mean: Callable[[Array], Array] = _itself
    # The argument of `AttentionMap.statistics` that it requires, if any.
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
