"""From the numbers of several seeds to a verdict: reproduced, partly, or not."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.claims import base

CONFIDENCE = 0.9  # of intervals
FEWEST_SEEDS = 3
REPRODUCED, PARTLY, NOT, OPEN = WORDS = "reproduced", "partly", "not", "open"
HOLDS, FAILS, UNDECIDED, VOID = "holds", "fails", "undecided", "void"


class Interval(NamedTuple):
    """Where the mean over seeds lies, with a confidence of `CONFIDENCE`."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Returns "0.912 (0.88 to 0.94)"."""
        mean, low, high = (f"{each:.{digits}g}" for each in self)
        return f"{mean} ({low} to {high})"


class Judged(NamedTuple):
    """A criterion, judged.

    Attributes:
      criterion: The criterion.
      values: `[n]`, a number of each seed.
      interval: That of their mean.
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
      word: `REPRODUCED`, `PARTLY` or `NOT`; `OPEN` with fewer than `FEWEST_SEEDS`.
      judged: Each criterion.
      seeds: Those that were measured.
    """

    word: str
    judged: tuple[Judged, ...]
    seeds: tuple[int, ...]


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of independent numbers and Student's interval around it.

    A single number, or one that is not finite, leaves the interval without an end.
    """
    values = np.asarray(values, np.float64)
    count = len(values)
    mean = float(values.mean())
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, -math.inf, math.inf)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    half = float(quantile * values.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half)


def judge(
    criteria: Sequence[base.Criterion],
    numbers: Mapping[int, base.Numbers],
    control: Verdict | None = None,
) -> Verdict:
    """Returns the verdict on one arm.

    Args:
      criteria: Those of the claim.
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
    count = sum(each.word == HOLDS for each in judged)
    word = REPRODUCED if count == len(judged) else PARTLY if count else NOT
    if len(seeds) < FEWEST_SEEDS:
        word = OPEN
    return Verdict(word, tuple(judged), seeds)


def _side(criterion: base.Criterion, around: Interval) -> str:
    low, high = around.low - criterion.bound, around.high - criterion.bound
    holds, fails = low >= 0, high < 0
    if criterion.at_least is None:
        holds, fails = high <= 0, low > 0
    return HOLDS if holds else FAILS if fails else UNDECIDED
