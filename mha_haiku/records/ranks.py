"""Ranks of heads by a number: their uncertainty, and the agreement of two rankings.

L layers, H heads of a layer, N examples.
"""

from typing import Protocol

import numpy as np


class Measured(Protocol):
    """A column of heads, or a record, which means its first column."""

    @property
    def mean(self) -> np.ndarray: ...

    @property
    def per_example(self) -> np.ndarray | None: ...


_SHARE = 0.95  # of resamples in an interval
_RESAMPLES = 1000


def rank_intervals(heads: Measured) -> np.ndarray:
    """Computes bootstrap intervals of the ranks of heads by their importance.

    An interval contains 95 % of 1,000 resamples, which draw the examples with
    replacement; a head's mean is over those drawn that have a number for it. The result
    is `[L, H, 2]`: lowest and highest rank, 1 for the most important head; NaN, and not
    ranked, where fewer than two examples have a number, which tell nothing about the
    spread.

    Raises:
      ValueError: If there are only means.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.

    Example:
      >>> numbers = np.random.default_rng(0).normal([[0.0, 0.1, 9.0]], size=(20, 1, 3))
      >>> found = mh.heads.Heads.of_examples(numbers)  # of [N, L, H]
      >>> mh.heads.rank_intervals(found).tolist()
      [[[2.0, 3.0], [2.0, 3.0], [1.0, 1.0]]]
    """
    import scipy.stats

    values = heads.per_example
    if values is None:
        raise ValueError("heads must have per_example, got only means.")
    count, is_number = len(values), ~np.isnan(values)
    is_ranked = is_number.sum(0) > 1
    result = np.full((*is_ranked.shape, 2), np.nan)
    if not is_ranked.any():
        return result
    values, is_number = values[:, is_ranked], is_number[:, is_ranked]
    generator = np.random.default_rng(0)
    draws = generator.multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    drawn = draws @ is_number.astype(np.float64)
    sums = draws @ np.where(is_number, values, 0)
    means = sums / np.where(drawn, drawn, np.nan)
    ranks = scipy.stats.rankdata(-means, axis=-1, nan_policy="omit")
    ends = np.nanquantile(ranks, [(1 - _SHARE) / 2, (1 + _SHARE) / 2], axis=0)
    result[is_ranked] = ends.T
    return result


def rank_correlation(first: Measured, second: Measured) -> float:
    """Computes Spearman's correlation, in [-1, 1], of the means of two columns.

    NaN if one is constant over the heads.

    Raises:
      ValueError: If the two have different heads.

    Example:
      >>> one = mh.heads.Heads.of_examples(np.array([[[4.0, 0.1], [3.0, 0.2]]]))
      >>> other = mh.heads.Heads.of_examples(np.array([[[2.0, 0.4], [1.0, 0.3]]]))
      >>> round(mh.heads.rank_correlation(one, other), 2)
      0.8
    """
    import scipy.stats

    one, other = first.mean, second.mean
    if one.shape != other.shape or (np.isnan(one) != np.isnan(other)).any():
        raise ValueError("the two must have the same layers and heads.")
    one, other = one[~np.isnan(one)], other[~np.isnan(other)]
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    result = scipy.stats.spearmanr(one, other)
    return float(result.statistic)  # pyright: ignore[reportAttributeAccessIssue]
