"""What a statistic of a head is: what a tile adds for each query, and what follows.

`B...` batch axes, H heads, T query positions, R of them in a block; S key positions, C
of them in a tile. The statistics that there are stand in `statistics.py`. What is
linear in the weights adds a column to one matrix product that all share.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mha_haiku.core.attention import observation

Array = jax.Array


class RowSum(NamedTuple):
    """What adds up over the keys of each query.

    Attributes:
      from_tile: From a tile and its products with the columns, `[R]` each, to what it
        adds, `[R]`; or to a tuple of such, where `size` says how many. 0 where weights
        are 0, as tiles are skipped and rows and columns repeat; see `Observation`.
      columns: Functions of a tile, to `[C]` each: numbers of its keys whose sums,
        weighted by the weights, are wanted. All columns of all sums are one matrix
        product, which makes them nearly free.
      size: How many sums it is, of which `Statistic.from_sums` gets a tuple; None: one.
      is_largest: Whether the largest counts in place of the sum. That has no gradient,
        but for `LARGEST`, which `statistics` gives one.
    """

    from_tile: Callable[..., Any]
    columns: tuple[Callable[[observation.Tile], Array], ...] = ()
    size: int | None = None
    is_largest: bool = False


def linear(column: Callable[[observation.Tile], Array]) -> RowSum:
    """Returns the sum over keys of weight times a number of the key."""
    return RowSum(lambda tile, product: product, (column,))


def _itself(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number per query, averaged over the queries of a head."""

    name: str  # its name in `Statistics`
    unit: str  # what it is measured in
    label: str  # what it says, for tables and figures
    sums: tuple[RowSum, ...]  # what tiles add up to
    # From these sums, `[..., T]`, to the statistic of each query.
    from_sums: Callable[..., Array] = _itself
    # From the mean over queries to the statistic of the head.
    from_mean: Callable[[Array], Array] = _itself
    # The argument of `AttentionMap.statistics` without which there is none.
    needs: str | None = None
    source: str = ""  # where it comes from


@dataclasses.dataclass(frozen=True)
class HeadStatistic:
    """A number of a head that is no mean over its queries.

    Its fields are as in `Statistic`; `from_sums` gives `[B..., H]`.
    """

    name: str
    unit: str
    label: str
    from_sums: Callable[["HeadSums"], Array]
    source: str = ""


class HeadSums(NamedTuple):
    """The sums from which `HeadStatistic`s are made."""

    counts: Array  # `[B..., H, T]` booleans, the queries that count
    received: Array  # `[B..., H, S]`, the mass that each key receives
    # Booleans `[B..., H, S]`, which keys no query may see; None: none.
    unseen: Array | None
