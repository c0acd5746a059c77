"""Scores of how well numbers separate parts that are known to matter from others."""

import numpy as np


def auroc(values: np.ndarray, is_real: np.ndarray) -> float:
    """Computes the probability that a real head or edge is ranked above another.

    1 if all real ones are above all others, 0.5 for chance; ties count half. Larger
    values are more important, NaN where there is no head; `is_real` are booleans of the
    same shape.

    Raises:
      ValueError: If all heads or edges are real, or none are.

    Source: Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747.

    Example:
      >>> importance = np.array([[3.0, 0.1], [2.0, 0.2]])
      >>> mh.rasp.auroc(importance, np.array([[True, False], [True, False]]))
      1.0
    """
    values, is_real = np.asarray(values), np.asarray(is_real)
    exists = ~np.isnan(values)
    positive, negative = values[exists & is_real], values[exists & ~is_real]
    if not positive.size or not negative.size:
        raise ValueError(
            f"is_real must have both True and False where values are not NaN, got "
            f"{positive.size} and {negative.size}."
        )
    above = np.sign(positive[:, None] - negative[None])
    return float((above.mean() + 1) / 2)
