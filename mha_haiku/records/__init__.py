"""Records of heads (named columns) and of maps, their checks and their files."""

from mha_haiku.records.heads import Column, Heads, Layer
from mha_haiku.records.results import Result

__all__ = ["Column", "Heads", "Layer", "Result"]
