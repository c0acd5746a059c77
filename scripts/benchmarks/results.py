"""The statistics of a duel, a plain table of them, and promises about them.

A ratio is taken within each round, where both contenders had similar conditions; the
total ratio is the median over rounds. Rounds with a foreign load are left out if enough
quiet ones remain; otherwise all count, and the table says so.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scripts.benchmarks import duel

# From this many seconds on a table is in seconds, not milliseconds.
_LONG = 5.0


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float
    num_quiet: int  # values that no foreign load disturbed
    num_all: int

    @property
    def is_quiet(self) -> bool:
        """Whether only quiet values count."""
        return self.num_quiet >= _enough(self.num_all)


def seconds(result: duel.Result) -> Spread:
    """Returns the spread of the seconds per unit of work."""
    values = [sample.seconds for sample in result.samples]
    return spread(values, [sample.is_quiet for sample in result.samples])


def ratio(result: duel.Result, base: duel.Result) -> Spread:
    """Returns the spread of this one's seconds over the base's, round by round."""
    pairs = list(zip(result.samples, base.samples, strict=False))
    values = [mine.seconds / other.seconds for mine, other in pairs]
    return spread(values, [mine.is_quiet and other.is_quiet for mine, other in pairs])


def spread(values: Sequence[float], is_quiet: Sequence[bool]) -> Spread:
    """Returns the spread of the quiet values, or of all where those are too few."""
    quiet = [value for value, good in zip(values, is_quiet, strict=True) if good]
    counted = quiet if len(quiet) >= _enough(len(values)) else values
    if len(counted) == 1:
        low = median = high = counted[0]
    else:
        low, median, high = statistics.quantiles(counted, method="inclusive")
    return Spread(low, median, high, len(quiet), len(values))


def table(results: Sequence[duel.Result], base: str, unit: str) -> list[str]:
    """Returns the lines of a table with a row per contender that finished.

    Args:
      results: Results of a duel.
      base: The contender that the others are compared with; "" for none.
      unit: Name of a unit of work: "step".
    """
    by_name = {result.name: result for result in results}
    shown = [result for result in results if result.samples and not result.fault]
    if not shown:
        return ["(no contender finished)"]
    is_long = max(seconds(result).median for result in shown) >= _LONG
    scale, prefix = (1, "") if is_long else (1e3, "m")
    facts = list(dict.fromkeys(name for result in shown for name in result.facts))
    header = ["contender", f"{prefix}s/{unit}", "quartiles", f"{unit}s/s"]
    header += [f"time / {base}", "quartiles"] if base else []
    header += ["quiet rounds", *facts]
    rows = [header]
    for result in shown:
        time = seconds(result)
        low, median, high = (f"{scale * value:.4g}" for value in time[:3])
        row = [result.name, median, f"{low} - {high}", f"{1 / time.median:.4g}"]
        if base:
            share = ratio(result, by_name[base])
            row += [f"{share.median:.2f}", f"{share.low:.2f} - {share.high:.2f}"]
        row.append(f"{time.num_quiet}/{time.num_all}{'' if time.is_quiet else ' !'}")
        row += [_text(result.facts.get(name)) for name in facts]
        rows.append(row)
    lines = _aligned(rows)
    if any(not seconds(result).is_quiet for result in shown):
        lines.append(
            "! LOADED: other work kept the machine busy; all rounds count, as too few "
            "were quiet."
        )
    return lines


def troubles(results: Sequence[duel.Result], extra: str) -> list[str]:
    """Returns a line for each contender that did not finish.

    Args:
      results: Results of a duel.
      extra: The extra to install if a package is missing.
    """
    lines = []
    for result in results:
        if result.missing:
            lines.append(
                f"SKIPPED {result.name}: there is no package {result.missing!r}; "
                f"pip install {extra}"
            )
        elif result.fault:
            lines.append(f"FAILED {result.name}: {result.fault}")
    return lines


class Promise(NamedTuple):
    """A limit of a contender's quantity, as a number or as a share of another's."""

    contender: str
    limit: float  # of `quantity`: at most this share of the base's, or this much
    # "" where the limit is not a share; of several, the one with the least counts.
    base: str | tuple[str, ...] = ""
    quantity: str = "seconds"  # or the name of a fact

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
        return f"{self.contender} {self.quantity} <= {self.limit:g}{of}"

    def measured(self, by_name: Mapping[str, duel.Result]) -> tuple[Spread, str] | None:
        mine, *others = (by_name[name] for name in self.contenders)
        if self._amount(mine) is None or not all(map(self._amount, others)):
            return None
        base = min(others, key=self._amount, default=None)
        of = f" of {base.name}'s" if len(others) > 1 else ""
        if self.quantity == "seconds":
            return ratio(mine, base) if base else seconds(mine), of
        share = self._amount(mine) / (self._amount(base) if base else 1)
        return Spread(share, share, share, 1, 1), of

    def _amount(self, result) -> float | None:
        """Returns the quantity of one contender, the median of seconds."""
        if self.quantity == "seconds":
            return seconds(result).median
        return result.facts.get(self.quantity)


def verdict(promise: Promise, results: Sequence[duel.Result]) -> str:
    """Returns a line with the promise, the measurement and the outcome.

    A promise is kept or broken if both quartiles are on one side and, for times, if
    enough rounds were quiet.
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


def _enough(num_all: int) -> int:
    """Returns how many quiet values are enough: half of all, rounded up."""
    return max(1, (num_all + 1) // 2)


def _text(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with columns of one width; the first to the left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [
            cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
