"""The mean over examples and its standard error, for the whole package."""

import numpy as np


def mean(values: np.ndarray) -> np.ndarray:
    """Averages over the first axis, in float64; ignores NaN unless all are NaN."""
    values = np.asarray(values, np.float64)
    count = (~np.isnan(values)).sum(0)
    return np.nansum(values, 0) / np.where(count, count, np.nan)


def standard_error(values: np.ndarray) -> np.ndarray:
    """Returns the standard error of `mean`; NaN for fewer than two values."""
    values = np.asarray(values, np.float64)
    is_number = ~np.isnan(values)
    count = is_number.sum(0)
    squares = np.where(is_number, values - mean(values), 0) ** 2
    variance = squares.sum(0) / np.where(count > 1, count - 1, np.nan)
    return np.sqrt(variance / np.maximum(count, 1))
