"""Multi-head attention for JAX and Haiku: train it, look into it, take it apart."""

from mha_haiku import attention, heads, masks, models, modules, positions, tasks
from mha_haiku.attention import AttentionMap, attend
from mha_haiku.modules import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
)

__all__ = [
    "AttentionMap",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "MultiHeadAttention",
    "attend",
    "attention",
    "heads",
    "masks",
    "models",
    "modules",
    "positions",
    "tasks",
]
