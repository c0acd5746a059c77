"""Pictures, tables and a page, from arrays alone: nothing here runs a model.

Each function returns the bytes or the text of a file; who asks for it writes it.
"""

from mha_haiku.report import curves, drawing, figures, heads, labels, maps, page, tables

__all__ = [
    "curves",
    "drawing",
    "figures",
    "heads",
    "labels",
    "maps",
    "page",
    "tables",
]
