"""Records of heads (named columns) and of maps, their checks and their files.

Everything that computes a number per head returns `Heads`: importance, roles,
statistics. A column has its unit and label, so that its table, file, figure, page and
command need no change. Measuring is in `lab`, drawing in `showing`.
"""

from mha_haiku.records.heads import Column, Heads, Layer
from mha_haiku.records.results import Result

__all__ = ["Column", "Heads", "Layer", "Result"]
