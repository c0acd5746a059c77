"""Pictures, tables and a page, made from arrays: nothing here runs a model.

Each function returns the bytes or the text of a file; its caller writes the file.
"""

from mha_haiku.report import (
    archive,
    curves,
    dossier,
    drawing,
    figures,
    fitting,
    heads,
    labels,
    map_set,
    page,
    tables,
)

__all__ = [
    "archive",
    "curves",
    "dossier",
    "drawing",
    "figures",
    "fitting",
    "heads",
    "labels",
    "map_set",
    "page",
    "tables",
]
