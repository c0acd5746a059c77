"""Records of heads: numbers in named columns, and their files."""

from mha_haiku.records.heads import Column, Heads, Layer

__all__ = ["Column", "Heads", "Layer"]
