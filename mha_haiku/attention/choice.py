"""Which implementation of attention suits a call.

T query positions, S key positions, N heads of all examples.
"""

import math

from mha_haiku.attention import fused, gradients

# Numbers of scores up to which the whole matrix is as fast as its tiles: measured on
# the CPU; on accelerators not, where it is a quarter of a GiB.
_DENSE_SCORES = {"cpu": 2**20}
_DENSE_SCORES_ON_ACCELERATORS = 2**26


def automatic(inputs: gradients.Inputs, dropout_rate: float, platform: str) -> str:
    """Returns the name of the implementation for a call.

    Args:
      inputs: What is attended to; only shapes, dtypes and the kinds of mask, bias and
        score matter.
      dropout_rate: Share of the weights set to zero, in [0, 1).
      platform: As `fused.platform()` names it.

    Returns:
      "fused" on an accelerator whose kernel can do the call; else "dense" where the
      N T S scores are few, and "blockwise" where they are many.
    """
    if fused.refusal(inputs, dropout_rate, platform) is None:
        return "fused"
    most = _DENSE_SCORES.get(platform, _DENSE_SCORES_ON_ACCELERATORS)
    return "dense" if math.prod(inputs.map_shape) <= most else "blockwise"
