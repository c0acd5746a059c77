"""From the numbers of several seeds to a verdict, and from a pilot to their number."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.claims import base

CONFIDENCE = 0.9  # of intervals
FEWEST_SEEDS, MOST_SEEDS = 3, 6
REPRODUCED, PARTLY, NOT, INCONCLUSIVE = WORDS = (
    "reproduced",
    "partly",
    "not reproduced",
    "inconclusive",
)
HOLDS, FAILS, UNDECIDED, VOID = "holds", "fails", "undecided", "void"


class Interval(NamedTuple):
    """Where the mean over seeds lies, with a confidence of `CONFIDENCE`."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Returns "0.912 (0.88 to 0.94)", or "1 (in all seeds)" without a spread."""
        mean, low, high = (f"{each:.{digits}g}" for each in self)
        return f"{mean} (in all seeds)" if low == high else f"{mean} ({low} to {high})"


class Judged(NamedTuple):
    """A criterion, judged.

    Attributes:
      criterion: The criterion.
      values: `[n]`, a number of each seed.
      interval: The interval of their mean.
      word: `HOLDS` if the whole interval is on the right side of the bound, `FAILS` if
        it is on the wrong one; `UNDECIDED` if the bound is within; `VOID` if it would
        hold, but does so in the control too.
    """

    criterion: base.Criterion
    values: np.ndarray
    interval: Interval
    word: str


class Verdict(NamedTuple):
    """What the seeds of one arm say.

    Attributes:
      word: `REPRODUCED` if all criteria hold, `NOT` if none does, `PARTLY` between;
        `INCONCLUSIVE` if that hangs on criteria that are undecided, or with fewer than
        `FEWEST_SEEDS`.
      judged: Each criterion.
      seeds: Those that were measured.
    """

    word: str
    judged: tuple[Judged, ...]
    seeds: tuple[int, ...]

    @property
    def holding(self) -> int:
        """The number of criteria that hold."""
        return sum(each.word == HOLDS for each in self.judged)


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of independent numbers and Student's interval around it.

    A single number, or one that is not finite, leaves the interval without an end.
    """
    values = np.asarray(values, np.float64)
    mean = float(values.mean())
    if len(values) < 2 or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)
    half = _half_width(values, len(values))
    return Interval(mean, mean - half, mean + half)


def seeds_needed(
    criteria: Sequence[base.Criterion], numbers: Mapping[int, base.Numbers]
) -> int:
    """Returns how many seeds a verdict takes, from the numbers of a pilot.

    It is `FEWEST_SEEDS` if an interval as wide as the pilot's spread makes it with so
    many leaves out every bound, where the pilot's means are the truth; else
    `MOST_SEEDS`.

    Args:
      criteria: Criteria of the claim.
      numbers: By seed, what the pilot measured; at least two seeds.
    """
    for criterion in criteria:
        values = np.array([criterion.value(each) for each in numbers.values()])
        if _half_width(values, FEWEST_SEEDS) > abs(values.mean() - criterion.bound):
            return MOST_SEEDS
    return FEWEST_SEEDS


def _half_width(values, count) -> float:
    """Returns half of the interval of `count` numbers that are spread as `values`."""
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return float(quantile * values.std(ddof=1) / math.sqrt(count))


def judge(
    criteria: Sequence[base.Criterion],
    numbers: Mapping[int, base.Numbers],
    control: Verdict | None = None,
) -> Verdict:
    """Returns the verdict on one arm.

    Args:
      criteria: Criteria of the claim.
      numbers: By seed, what was measured; at least one seed.
      control: The verdict on the other arm, if this one is the claim's: what holds
        there too does not count.
    """
    seeds = tuple(sorted(numbers))
    judged = []
    for i, criterion in enumerate(criteria):
        values = np.array([criterion.value(numbers[seed]) for seed in seeds])
        around = interval(values)
        word = _side(criterion, around)
        if control and word == control.judged[i].word == HOLDS:
            word = VOID
        judged.append(Judged(criterion, values, around, word))
    words = [each.word for each in judged]
    least = words.count(HOLDS)
    most = least + words.count(UNDECIDED)
    word = _word(least, len(words))
    if len(seeds) < FEWEST_SEEDS or word != _word(most, len(words)):
        word = INCONCLUSIVE
    return Verdict(word, tuple(judged), seeds)


def both(first: str, second: str | None) -> str:
    """Returns the verdict of two sets of seeds: one that both have.

    The second is None where there is none.
    """
    return first if second in (first, None) else INCONCLUSIVE


def _word(holding, count) -> str:
    return REPRODUCED if holding == count else PARTLY if holding else NOT


def _side(criterion: base.Criterion, around: Interval) -> str:
    low, high = around.low - criterion.bound, around.high - criterion.bound
    holds, fails = low >= 0, high < 0
    if criterion.at_least is None:
        holds, fails = high <= 0, low > 0
    return HOLDS if holds else FAILS if fails else UNDECIDED
