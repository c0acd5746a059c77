"""The statistics of a duel, and a plain table of them.

A ratio is taken within each round, where both contenders met much the same machine; the
ratio of the whole is the median over rounds. Rounds with a foreign load are left out
where enough quiet ones remain; where not, all count, and the table says so.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scripts import duel

# Seconds from which on a table is in seconds, not milliseconds.
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


def processor_seconds(result: duel.Result) -> Spread:
    """Returns the same of processor seconds, which other work disturbs less."""
    values = [sample.processor_seconds for sample in result.samples]
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
    """Returns the lines of a table with a row per contender that came to the end.

    Args:
      results: Of a duel.
      base: The contender that the others are compared with; "" for none.
      unit: What a unit of work is called: "step".
    """
    by_name = {result.name: result for result in results}
    shown = [result for result in results if result.samples and not result.fault]
    if not shown:
        return ["(nobody came to the end)"]
    is_long = max(seconds(result).median for result in shown) >= _LONG
    scale, prefix = (1, "") if is_long else (1e3, "m")
    facts = list(dict.fromkeys(name for result in shown for name in result.facts))
    header = ["contender", f"{prefix}s/{unit}", "quartiles", f"{unit}s/s"]
    header.append(f"processor {prefix}s")
    header += [f"time / {base}", "quartiles"] if base else []
    header += ["quiet rounds", *facts]
    rows = [header]
    for result in shown:
        time = seconds(result)
        low, median, high = (f"{scale * value:.4g}" for value in time[:3])
        row = [result.name, median, f"{low} - {high}", f"{1 / time.median:.4g}"]
        row.append(f"{scale * processor_seconds(result).median:.4g}")
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
    """Returns a line for each contender that did not come to the end.

    Args:
      results: Of a duel.
      extra: What to install where a package is missing.
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
