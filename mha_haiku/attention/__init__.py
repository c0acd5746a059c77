"""Attention as pure functions of arrays, and the map that it leaves behind."""

from mha_haiku.attention.attend import attend
from mha_haiku.attention.attention_map import AttentionMap
from mha_haiku.attention.blockwise import Blockwise
from mha_haiku.attention.implementations import IMPLEMENTATIONS
from mha_haiku.attention.pooling import bin_edges
from mha_haiku.attention.scores import Score, additive, dot_product
from mha_haiku.attention.sharded import IN_A_RING, Sharded
from mha_haiku.attention.statistics import Statistics

__all__ = [
    "IMPLEMENTATIONS",
    "IN_A_RING",
    "AttentionMap",
    "Blockwise",
    "Score",
    "Sharded",
    "Statistics",
    "additive",
    "attend",
    "bin_edges",
    "dot_product",
]
