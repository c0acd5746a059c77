"""Pictures, tables and a page, made from arrays: nothing here runs a model.

Each function returns the bytes or the text of a file; its caller writes the file.
"""

from mha_haiku.report import (
    curves,
    dossier,
    drawing,
    figures,
    fitting,
    heads,
    labels,
    maps,
    page,
    tables,
)

__all__ = [
    "curves",
    "dossier",
    "drawing",
    "figures",
    "fitting",
    "heads",
    "labels",
    "maps",
    "page",
    "tables",
]
