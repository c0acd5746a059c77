"""Positions of tokens: sinusoidal and rotary encodings, ALiBi and T5 score biases."""

from mha_haiku.core.positions.biases import (
    ScoreBias,
    alibi,
    as_bias,
    relative_bias,
)
from mha_haiku.core.positions.encodings import rotary, sinusoidal

__all__ = [
    "ScoreBias",
    "alibi",
    "as_bias",
    "relative_bias",
    "rotary",
    "sinusoidal",
]
