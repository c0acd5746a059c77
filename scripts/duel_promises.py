"""What the project promises of a duel, and what a duel says of it.

A promise knows who must have come to the end for it (`contenders`), how it reads
(`said`), and what was measured of it (`measured`): a spread and words that belong to
it, or None where that cannot be told.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts import duel, duel_table


class Promise(NamedTuple):
    """Of one contender: that a quantity is at most so much, or such a share."""

    contender: str
    limit: float  # of `quantity`: at most this share of the base's, or this much
    # "" where the limit is not a share; of several, the one with the least counts.
    base: str | tuple[str, ...] = ""
    quantity: str = "seconds"  # or the name of a fact
    aim: float | None = None  # what is hoped for beyond the promise

    @property
    def bases(self) -> tuple[str, ...]:
        """Whose share the limit is; none where it is not a share."""
        if isinstance(self.base, str):
            return (self.base,) if self.base else ()
        return self.base

    @property
    def contenders(self) -> tuple[str, ...]:
        return (self.contender, *self.bases)

    @property
    def said(self) -> str:
        of = f" of {self.bases[0]}'s" if self.bases else ""
        if len(self.bases) > 1:
            of = f" of the least of {', '.join(self.bases)}"
        aim = "" if self.aim is None else f" (aim: {self.aim:g})"
        return f"{self.contender} {self.quantity} <= {self.limit:g}{of}{aim}"

    def measured(
        self, by_name: Mapping[str, duel.Result]
    ) -> tuple[duel_table.Spread, str] | None:
        mine, *others = (by_name[name] for name in self.contenders)
        if self._amount(mine) is None or not all(map(self._amount, others)):
            return None
        base = min(others, key=self._amount, default=None)
        of = f" of {base.name}'s" if len(others) > 1 else ""
        if self.quantity == "seconds":
            return duel_table.ratio(mine, base) if base else duel_table.seconds(
                mine
            ), of
        share = self._amount(mine) / (self._amount(base) if base else 1)
        return duel_table.Spread(share, share, share, 1, 1), of

    def _amount(self, result) -> float | None:
        """Returns the quantity of one contender, the median of seconds."""
        if self.quantity == "seconds":
            return duel_table.seconds(result).median
        return result.facts.get(self.quantity)


class Growth(NamedTuple):
    """Of contenders that do the same at several sizes: `seconds ~ size ** exponent`."""

    sizes: Mapping[str, float]  # of each contender
    limit: float  # of the exponent, fitted to the logarithms within each round

    @property
    def contenders(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def said(self) -> str:
        low, high = min(self.sizes.values()), max(self.sizes.values())
        return f"exponent of seconds in size, {low} to {high}, <= {self.limit:g}"

    def measured(
        self, by_name: Mapping[str, duel.Result]
    ) -> tuple[duel_table.Spread, str] | None:
        sizes = [math.log(size) for size in self.sizes.values()]
        samples = [by_name[name].samples for name in self.sizes]
        exponents, is_quiet = [], []
        for turns in zip(*samples, strict=False):
            seconds = [math.log(turn.seconds) for turn in turns]
            exponents.append(statistics.linear_regression(sizes, seconds).slope)
            is_quiet.append(all(turn.is_quiet for turn in turns))
        return duel_table.spread(exponents, is_quiet), ""


def verdict(promise: Promise | Growth, results: Sequence[duel.Result]) -> str:
    """Returns a line that says what was promised, what was measured, and the outcome.

    Kept and broken are said where all between the quartiles is on one side, and, of
    times, where enough rounds were quiet.
    """
    by_name = {result.name: result for result in results if result.samples}
    there = set(promise.contenders) <= set(by_name)
    measured = promise.measured(by_name) if there else None
    if measured is None:
        return f"promised: {promise.said}; NOT MEASURED"
    spread, of = measured
    if not spread.is_quiet:
        outcome = "UNCLEAR under foreign load; measure again on a quiet machine"
    elif spread.high <= promise.limit:
        outcome = "kept"
    elif spread.low > promise.limit:
        outcome = "BROKEN"
    else:
        outcome = "UNCLEAR, the quartiles are on both sides"
    return f"promised: {promise.said}; measured {spread.median:.3g}{of}: {outcome}"
