"""Haiku modules: they hold the parameters, and pure functions compute with them.

The parts of a layer are made from sizes (`Encoder(num_layers=2, num_heads=4,
key_size=16, hidden_size=128)`) or by functions (`make_attention=`,
`make_feed_forward=`, `make_norm=`, or `make_layer=` for all). Attention, layers and
stacks return `(output, map or maps)`, and their `step`, which takes a cache, the
updated cache too. Values worth reading or editing are sites, named where they are
computed. Only `anatomy` gives names of parameters a meaning: pruning, meshes, stacking
and weight decay use it. What another part needs:

  A parameter: a line in `anatomy`, if one of its axes holds heads or hidden units.
  A score, normalizer or gates: `pattern.register`, or a line in `pattern.SCORES`,
    `NORMALIZERS` or `GATES`, with the fields of the config that it reads.
  A position scheme: its entry in `embeddings.POSITION_SCHEMES`.
  A norm or an activation: a function or a module of one argument, and its name in
    `models.architecture`.
"""

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
