"""How well measures of importance find the heads that are known to matter.

L layers, H heads of a layer.
"""

from collections.abc import Callable

import numpy as np

from mha_haiku.heads import ground_truth, importance, subject


def auroc(found: np.ndarray, real: np.ndarray) -> float:
    """Returns the probability that a real head is ranked above another.

    Args:
      found: `[L, H]`, the larger the more important; NaN where there is no head.
      real: `[L, H]` booleans.

    Returns:
      1 where all real heads are above all others, 0.5 for chance; ties count half.

    Source: Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747.
    """
    import scipy.stats

    there = ~np.isnan(found)
    positive, negative = found[there & real], found[there & ~real]
    if not positive.size or not negative.size:
        raise ValueError("there must be real heads and others.")
    wins = scipy.stats.mannwhitneyu(positive, negative).statistic
    return float(wins / (positive.size * negative.size))


def scores(
    known: ground_truth.KnownHeads,
    measures: dict[str, Callable[[subject.Subject], importance.Importance]],
) -> dict[str, float]:
    """Returns the AUROC of each measure at finding the real heads.

    Args:
      known: The model.
      measures: By their names.
    """
    return {
        name: auroc(measure(known.subject).mean, known.real)
        for name, measure in measures.items()
    }
