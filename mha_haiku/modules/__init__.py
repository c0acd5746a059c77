"""Haiku modules; they own parameters, and leave the numbers to pure functions."""

from mha_haiku.modules.decoder import Decoder, DecoderLayer
from mha_haiku.modules.embeddings import (
    LearnedPositions,
    RelativePositions,
    TokenEmbedding,
)
from mha_haiku.modules.encoder import Encoded, Encoder, EncoderLayer
from mha_haiku.modules.feed_forward import FeedForward, gelu
from mha_haiku.modules.layer_parameters import is_stacked, stacked, unstacked
from mha_haiku.modules.layer_stacks import looped, rematerialized, scanned
from mha_haiku.modules.learned_scores import additive_score, smeared_keys
from mha_haiku.modules.multi_head_attention import MultiHeadAttention
from mha_haiku.modules.no_attention import NoAttention
from mha_haiku.modules.norms import LayerNorm, RMSNorm

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoded",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "MultiHeadAttention",
    "NoAttention",
    "RMSNorm",
    "RelativePositions",
    "TokenEmbedding",
    "additive_score",
    "gelu",
    "is_stacked",
    "looped",
    "rematerialized",
    "scanned",
    "smeared_keys",
    "stacked",
    "unstacked",
]
