"""Haiku modules; they own parameters, and leave the numbers to pure functions."""

from mha_haiku.modules.decoder import Decoder, DecoderLayer
from mha_haiku.modules.embeddings import (
    LearnedPositions,
    RelativePositions,
    TokenEmbedding,
)
from mha_haiku.modules.encoder import Encoder, EncoderLayer
from mha_haiku.modules.feed_forward import FeedForward, gelu
from mha_haiku.modules.layer_parameters import is_stacked, stacked, unstacked
from mha_haiku.modules.layer_stacks import looped, rematerialized, scanned
from mha_haiku.modules.multi_head_attention import MultiHeadAttention, additive_score
from mha_haiku.modules.norms import LayerNorm, RMSNorm

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "MultiHeadAttention",
    "RMSNorm",
    "RelativePositions",
    "TokenEmbedding",
    "additive_score",
    "gelu",
    "is_stacked",
    "looped",
    "rematerialized",
    "scanned",
    "stacked",
    "unstacked",
]
