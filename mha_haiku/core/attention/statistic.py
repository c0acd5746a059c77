"""What a statistic of a head is: what a tile adds for each query, and what follows.

A statistic is one entry of `STATISTICS` in `statistics.py`, which makes it an attribute
of `Statistics` and a column of tables, CSV files, pages and notebooks.

Its functions get an `observation.Tile` of one head of one example:

    weights, log_weights      [R, C]; weights are 0 where masked, log_weights finite
    rows, columns             Span: positions in the map; start, stop, size, array()
    given.queries["position"] [R], where queries stand; in a call with `first_query`,
                              or a part of a sequence, these differ from rows.array()
    given.queries["tokens"]   [R], and given.keys["tokens"] [C]: token ids
    given.keys["preceding"]   [C], the token before each key
    given.keys["positions"]   [C] booleans, the chosen positions

Tokens and chosen positions exist where `AttentionMap.statistics` got `tokens=` or
`positions=`; an entry that reads them says so by `needs`. A tile does not know S;
`from_head` does, from the shape of `HeadSums.received`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mha_haiku.core.attention import observation

Array = jax.Array


class RowSum(NamedTuple):
    """What adds up over the keys of each query.

    Example:
      >>> from mha_haiku.core.attention import statistics
      >>> even = statistics.linear(lambda tile: tile.columns.array() % 2 == 0)
      >>> entry = mh.attention.Statistic("even", "share", "on even keys", (even,))
      >>> entry.sums[0].is_largest
      False
    """

    # `from_tile(tile, *products)` returns what a tile adds, `[R]`; with `size=n` a
    # tuple of n such arrays. It must be 0 where weights are 0, because tiles may be
    # skipped or overlap. There is a product `[R]` for each of `of_keys`.
    from_tile: Callable[..., Any]
    # Functions of a tile that return a number for each of its keys, `[C]`. The product
    # is the sum of these numbers, weighted by the query's weights. All products of all
    # statistics are one matrix product, which makes them nearly free.
    of_keys: tuple[Callable[[observation.Tile], Array], ...] = ()
    # How many sums there are, which `Statistic.from_sums` gets as a tuple; None: one.
    size: int | None = None
    # Combine tiles by maximum instead of sum. That has no gradient, but for `LARGEST`,
    # which `statistics` gives one.
    is_largest: bool = False


def linear(of_keys: Callable[[observation.Tile], Array]) -> RowSum:
    """Makes the sum over keys of weight times a number of the key."""
    return RowSum(lambda tile, product: product, (of_keys,))


def _itself(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number per query, averaged over the queries of a head; or one of the head.

    Example:
      >>> entropy = mh.attention.STATISTICS["entropy"]
      >>> entropy.label, entropy.unit
      ("entropy of a query's weights", 'nats')
    """

    name: str  # its name in `Statistics`
    unit: str  # what it is measured in
    label: str  # what it says, for tables and figures
    sums: tuple[RowSum, ...] = ()  # what tiles add up to
    # From these sums, `[..., T]`, to the statistic of each query.
    from_sums: Callable[..., Array] = _itself
    # From the mean over queries to the statistic of the head.
    from_mean: Callable[[Array], Array] = _itself
    # The argument of `AttentionMap.statistics` without which there is none.
    needs: str | None = None
    source: str = ""  # where it comes from
    # Instead of the sums above: the number of each head, `[B..., H]`, if it is no mean.
    from_head: Callable[["HeadSums"], Array] | None = None


class HeadSums(NamedTuple):
    """The sums from which statistics of whole heads are made."""

    counts: Array  # `[B..., H, T]` booleans, the queries that count
    received: Array  # `[B..., H, S]`, the mass that each key receives
    # Booleans `[B..., H, S]`, which keys no query may see; None: none.
    unseen: Array | None
