"""The mean over examples and its standard error, as all of the package takes them."""

import numpy as np


def mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the first axis, float64; NaN are left out.

    Args:
      values: `[N, ...]`.

    Returns:
      `[...]`; NaN where all values are NaN.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    count = known.sum(0)
    return np.where(known, values, 0).sum(0) / np.where(count, count, np.nan)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Returns the standard error of `mean`, from the spread of independent values.

    Args:
      values: `[N, ...]`; NaN are left out.

    Returns:
      `[...]`; NaN where fewer than two values are not NaN.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    count = known.sum(0)
    squares = np.where(known, values - mean(values), 0) ** 2
    variance = squares.sum(0) / np.where(count > 1, count - 1, np.nan)
    return np.sqrt(variance / np.where(count, count, np.nan))
