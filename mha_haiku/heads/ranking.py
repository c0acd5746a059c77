"""Orders of heads: how sure they are, how far measures agree, and which go first.

L layers, H heads of a layer, N examples, P pairs of heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mha_haiku.heads import closing as closings
from mha_haiku.heads import importance, subject


def rank_intervals(
    found: importance.Importance,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """Returns bootstrap intervals of the ranks of heads by their importance.

    Args:
      found: What a measure found; its examples are drawn with replacement.
      level: The share of resamples that an interval holds, in (0, 1).
      resamples: How many are drawn.
      seed: Of the draws.

    Returns:
      `[L, H, 2]`: lowest and highest rank, 1 for the most important head; NaN where
      there is no head.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    import scipy.stats

    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}.")
    generator = np.random.default_rng(seed)
    values = found.per_example
    there = ~np.isnan(values[0])
    values = values[:, there]
    count = len(values)
    draws = generator.multinomial(count, np.full(count, 1 / count), resamples)
    ranks = scipy.stats.rankdata(-(draws / count) @ values, axis=-1)
    ends = np.quantile(ranks, [(1 - level) / 2, (1 + level) / 2], axis=0)
    result = np.full((*there.shape, 2), np.nan)
    result[there] = ends.T
    return result


def rank_correlation(
    first: importance.Importance, second: importance.Importance
) -> float:
    """Returns Spearman's correlation of two measures' means, or of one in two models.

    Args:
      first: What a measure found.
      second: What another found of the same heads, or the same of other parameters.

    Returns:
      In [-1, 1]; NaN where one of them is the same for all heads.

    Raises:
      ValueError: If they are not of the same heads.
    """
    import scipy.stats

    one, other = first.mean, second.mean
    if one.shape != other.shape or (np.isnan(one) != np.isnan(other)).any():
        raise ValueError("the two must be of the same layers and heads.")
    one, other = one[~np.isnan(one)], other[~np.isnan(other)]
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(one, other).statistic)


def order(values: np.ndarray) -> list[tuple[int, int]]:
    """Returns (layer, place) of heads, the least important first.

    Args:
      values: `[L, H]`, NaN where there is no head.
    """
    there = np.argwhere(~np.isnan(values))
    ranks = np.argsort(values[tuple(there.T)], kind="stable")
    return [tuple(place) for place in there[ranks].tolist()]


def pairs(
    of: subject.Subject, *, closing: closings.Closing = closings.zero
) -> np.ndarray:
    """Returns the mean change of the metric when two heads are closed.

    Args:
      of: What is measured.
      closing: What closed heads pass on.

    Returns:
      `[L, H, L, H]` float64, symmetric; on the diagonal one head is closed.
    """
    there = _there(of)
    heads = np.argwhere(there)
    firsts, seconds = np.triu_indices(len(heads))
    gates = np.ones((1 + len(firsts), *there.shape), np.float32)
    rows = np.arange(1, len(gates))
    for which in (firsts, seconds):
        gates[(rows, *heads[which].T)] = 0
    found = importance.closed(of, gates, closing=closing).mean(0)
    change = np.full((*there.shape, *there.shape), np.nan)
    for one, other in ((firsts, seconds), (seconds, firsts)):
        change[(*heads[one].T, *heads[other].T)] = found[1:] - found[0]
    return change


class Step(NamedTuple):
    """A step of a greedy order: the head that is closed next, and the metric then."""

    head: tuple[int, int]  # (layer, place)
    metric: float  # mean over the examples, with it and all before it closed


def greedy_order(
    of: subject.Subject,
    *,
    closing: closings.Closing = closings.zero,
    progress: Callable = iter,
) -> list[Step]:
    """Closes head after head, each time the one that harms the metric least.

    Unlike an order by single ablations it sees that of two heads which do the same one
    has to stay.

    Args:
      of: What is measured.
      closing: What closed heads pass on.
      progress: Wraps the range of steps, as `tqdm.tqdm` does.

    Returns:
      A step per head, in the order of closing.
    """
    there = _there(of)
    gates = there.astype(np.float32)
    steps = []
    for _ in progress(range(int(there.sum()))):
        # As many patterns each time, so that one program serves all steps.
        heads = np.argwhere(there)
        patterns = np.repeat(gates[None], len(heads), axis=0)
        patterns[(np.arange(len(heads)), *heads.T)] = 0
        found = importance.closed(of, patterns, closing=closing).mean(0)
        found[gates[tuple(heads.T)] == 0] = np.inf
        best = int(np.argmin(found))
        gates[tuple(heads[best])] = 0
        steps.append(Step(tuple(heads[best].tolist()), float(found[best])))
    return steps


def _there(of) -> np.ndarray:
    """Returns `[L, H]`, which heads there are."""
    counts = subject.num_heads(of.model, of.params, next(iter(of.batches)))
    return np.arange(max(counts))[None] < np.array(counts)[:, None]
