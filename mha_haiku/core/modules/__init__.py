"""Haiku modules: they hold the parameters, and pure functions compute with them."""

from mha_haiku.core.modules.anatomy import is_stacked
from mha_haiku.core.modules.embeddings import (
    POSITION_SCHEMES,
    LearnedPositions,
    PositionScheme,
    RelativePositions,
    TokenEmbedding,
)
from mha_haiku.core.modules.feed_forward import FeedForward, gelu
from mha_haiku.core.modules.layer_stacks import (
    looped,
    scanned,
    stacked,
    unstacked,
)
from mha_haiku.core.modules.layers import Decoder, DecoderLayer, Encoder, EncoderLayer
from mha_haiku.core.modules.multi_head_attention import MultiHeadAttention
from mha_haiku.core.modules.no_attention import Bias, NoAttention
from mha_haiku.core.modules.norms import LayerNorm, RMSNorm, no_norm
from mha_haiku.core.modules.pattern import (
    CHOICES,
    SCORES,
    HeadTransforms,
    Pattern,
    head_gates,
    learned_sinks,
    smeared_keys,
)

__all__ = [
    "CHOICES",
    "HeadTransforms",
    "Pattern",
    "Bias",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "MultiHeadAttention",
    "NoAttention",
    "POSITION_SCHEMES",
    "PositionScheme",
    "SCORES",
    "RMSNorm",
    "RelativePositions",
    "TokenEmbedding",
    "gelu",
    "head_gates",
    "is_stacked",
    "learned_sinks",
    "looped",
    "no_norm",
    "scanned",
    "smeared_keys",
    "stacked",
    "unstacked",
]
