"""Verdicts from the numbers of several seeds; number of seeds from a pilot."""

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
    """An interval of the mean over seeds, with a confidence of `CONFIDENCE`."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Returns "0.912 (0.88 to 0.94)", or "1 (in every seed)" without a spread."""
        mean, low, high = (f"{number:.{digits}g}" for number in self)
        return f"{mean} (in every seed)" if low == high else f"{mean} ({low} to {high})"


class Judged(NamedTuple):
    """A criterion, judged.

    Attributes:
      criterion: The criterion.
      values: `[n]`, one number per seed.
      interval: The interval of their mean.
      word: `HOLDS` if the whole interval is on the right side of the bound, `FAILS` if
        it is on the wrong side; `UNDECIDED` if the bound is within; `VOID` if the
        criterion also holds in the control.
    """

    criterion: base.Criterion
    values: np.ndarray
    interval: Interval
    word: str


class Verdict(NamedTuple):
    """The verdict of the seeds of one arm.

    Attributes:
      word: `REPRODUCED` if all criteria hold, `NOT` if none does, `PARTLY` between;
        `INCONCLUSIVE` if that depends on undecided criteria, or with fewer than
        `FEWEST_SEEDS`.
      judged: The judged criteria.
      seeds: The measured seeds.
    """

    word: str
    judged: tuple[Judged, ...]
    seeds: tuple[int, ...]

    @property
    def holding(self) -> int:
        """The number of criteria that hold."""
        return sum(criterion.word == HOLDS for criterion in self.judged)


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


def is_close(judged: Judged) -> bool:
    """Returns whether an interval comes within half its width of the bound.

    Then three seeds do not settle on which side it lies.
    """
    _, low, high = judged.interval
    bound = judged.criterion.bound
    return bool(max(low - bound, bound - high) < (high - low) / 2)


def seeds_needed(
    criteria: Sequence[base.Criterion], numbers: Mapping[int, base.Numbers]
) -> int:
    """Returns how many seeds a verdict takes, from the numbers of a pilot.

    It is `FEWEST_SEEDS` if, with that many seeds and the pilot's spread, the interval
    around the pilot's mean contains no bound; else `MOST_SEEDS`.

    Args:
      criteria: Criteria of the claim.
      numbers: The pilot's measurements by seed; at least two seeds.
    """
    for criterion in criteria:
        values = np.array([criterion.value(measured) for measured in numbers.values()])
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
      numbers: Measurements by seed; at least one seed.
      control: The verdict on the control, if this arm is the claim's: criteria that
        hold there too do not count.
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
    words = [criterion_verdict.word for criterion_verdict in judged]
    least = words.count(HOLDS)
    most = least + words.count(UNDECIDED)
    word = _word(least, len(words))
    if len(seeds) < FEWEST_SEEDS or word != _word(most, len(words)):
        word = INCONCLUSIVE
    return Verdict(word, tuple(judged), seeds)


def both(first: str, second: str | None) -> str:
    """Returns the verdict that two sets of seeds agree on, or `INCONCLUSIVE`.

    The second is None if there is only one set.
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
