"""Attention and its observations tile by tile, in O(T + S) memory."""

from mha_haiku.core.attention.tiled.blockwise import Blockwise
from mha_haiku.core.attention.tiled.grid import bin_edges

__all__ = ["Blockwise", "bin_edges"]
