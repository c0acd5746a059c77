"""Which implementation "auto" takes for a call of `attend`."""

import math
from collections.abc import Callable

from mha_haiku.core.attention.inputs import Inputs

# From the inputs, the rate of dropout and the platform to whether "auto" is to take it.
Suits = Callable[[Inputs, float, str], bool]
preferred: dict[str, Suits] = {}  # by name; asked in turn before dense and blockwise

# Numbers of scores up to which the whole matrix is as fast as its tiles: measured on
# CPUs; on accelerators a guess that keeps the scores within a quarter of a GiB.
_DENSE_SCORES = {"cpu": 2**20}
_DENSE_SCORES_ON_ACCELERATORS = 2**26


def chosen(inputs: Inputs, dropout_rate: float, platform: str) -> str:
    """Returns the name of the implementation that suits a call.

    It is the first of the registered ones that says it suits; else "dense" where the
    scores of all heads and examples are few, and "blockwise" where they are many. Only
    shapes, dtypes and the kinds of mask, bias and score matter.
    """
    for name, suits in preferred.items():
        if suits(inputs, dropout_rate, platform):
            return name
    most = _DENSE_SCORES.get(platform, _DENSE_SCORES_ON_ACCELERATORS)
    return "dense" if math.prod(inputs.map_shape) <= most else "blockwise"
