"""The scores that a config can name, with the parameters that some of them learn.

A score is added here: a class (see `attention.Score`) and a call of `register`.

H query heads, K query/key size per head.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import haiku as hk

from mha_haiku.core import attention
from mha_haiku.core.modules import anatomy


class ScoreKind(NamedTuple):
    """A score as `config.model.attention.score` names it.

    Attributes:
      make: From H and K, and by keyword the fields, to the score; makes its parameters.
      fields: The fields of `config.model.attention` that it reads.
      stays_small: Whether exponentials of its scores stay small, so that weights need
        not be divided by their sum.
    """

    make: Callable[..., attention.Score]
    fields: tuple[str, ...] = ()
    stays_small: bool = False


SCORES: dict[str, ScoreKind] = {}


def register(
    name: str,
    make: Callable[..., attention.Score],
    *,
    fields: tuple[str, ...] = (),
    axes: Mapping[str, anatomy.Axis] | None = None,
    stays_small: bool = False,
) -> None:
    """Makes a score known to configs, and its parameters to all that asks for heads.

    Args:
      name: What a config calls it.
      make: See `ScoreKind`.
      fields: See `ScoreKind`.
      axes: Which axis of which of its parameters belongs to heads.
      stays_small: See `ScoreKind`.
    """
    SCORES[name] = ScoreKind(make, fields, stays_small)
    anatomy.register(axes or {})


def additive_score(
    num_heads: int, key_size: int, *, temperature: float = 1.0
) -> attention.Score:
    """Returns an additive score over a temperature, with a learned "score" `[H, K]`."""
    w_init = hk.initializers.VarianceScaling(1.0, "fan_in", "uniform", fan_in_axes=(1,))
    weight = hk.get_parameter("score", (num_heads, key_size), init=w_init)
    return attention.additive(weight if temperature == 1 else weight / temperature)


def cosine_score(
    num_heads: int, key_size: int, *, temperature: float = 1.0
) -> attention.Score:
    """Returns cosines times a learned "cosine_scale" `[H]`, which starts at 10.

    Source: Liu et al. 2022, eq. 2, https://arxiv.org/abs/2111.09883.
    """
    del key_size
    start = hk.initializers.Constant(10.0)
    scale = hk.get_parameter("cosine_scale", (num_heads,), init=start)
    return attention.cosine(scale if temperature == 1 else scale / temperature)


def _dot_product(num_heads, key_size, *, scale, soft_cap, temperature):
    del num_heads
    if soft_cap is not None:
        soft_cap /= temperature  # of the scores, which are divided too
    return attention.dot_product(_over(scale, key_size, temperature), soft_cap)


def _sigmoid(num_heads, key_size, *, scale, temperature, offset):
    del num_heads
    return attention.sigmoid(_over(scale, key_size, temperature), offset)


def _linear(num_heads, key_size):
    del num_heads, key_size
    return attention.linear()


def _over(scale, key_size, temperature) -> float | None:
    """Returns the scale over a temperature; None stands for 1 / sqrt(K)."""
    if temperature == 1:
        return scale
    return (1 / math.sqrt(key_size) if scale is None else scale) / temperature


register("dot_product", _dot_product, fields=("scale", "soft_cap", "temperature"))
register(
    "additive",
    additive_score,
    fields=("temperature",),
    axes={"score": anatomy.Axis(anatomy.HEADS, -2)},  # [H, K]
)
register(
    "cosine",
    cosine_score,
    fields=("temperature",),
    axes={"cosine_scale": anatomy.Axis(anatomy.HEADS, -1)},  # [H]
)
register(
    "sigmoid", _sigmoid, fields=("scale", "temperature", "offset"), stays_small=True
)
register("linear", _linear, stays_small=True)
