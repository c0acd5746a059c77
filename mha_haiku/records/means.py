"""The mean over examples and its standard error, for the whole package."""

import dataclasses

import numpy as np

from mha_haiku.core import display


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PerExample:
    """Numbers of N examples, with their means."""

    per_example: np.ndarray  # `[N, ...]` float64; NaN where there is no number

    def __repr__(self) -> str:
        return display.record(self)

    _repr_html_, show, plot = display.html, display.show, display.plot

    @property
    def mean(self) -> np.ndarray:
        """`[...]`, the mean over the examples."""
        return mean(self.per_example)

    @property
    def standard_error(self) -> np.ndarray:
        """`[...]`, of the mean, from the spread of examples; NaN for one example."""
        return standard_error(self.per_example)
