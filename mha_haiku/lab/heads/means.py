"""The mean over examples and its standard error, as all of the package takes them."""

import numpy as np


def mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over the first axis, float64; NaN are left out, if not all."""
    values = np.asarray(values, np.float64)
    count = (~np.isnan(values)).sum(0)
    return np.nansum(values, 0) / np.where(count, count, np.nan)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Returns the standard error of `mean`, from the spread of independent values.

    NaN where fewer than two values are not NaN.
    """
    values = np.asarray(values, np.float64)
    count = (~np.isnan(values)).sum(0)
    squares = np.nansum((values - mean(values)) ** 2, 0)
    return np.sqrt(squares / np.where(count > 1, count * (count - 1), np.nan))
