"""Attention as pure functions of arrays, and the map that it leaves behind."""

from mha_haiku.attention.attend import attend
from mha_haiku.attention.attention_map import AttentionMap, bin_edges
from mha_haiku.attention.scores import Score, additive, dot_product

__all__ = ["AttentionMap", "Score", "additive", "attend", "bin_edges", "dot_product"]
