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
    labels,
    map_set,
    page,
    per_head,
    tables,
)

__all__ = [
    "archive",
    "curves",
    "dossier",
    "drawing",
    "figures",
    "fitting",
    "per_head",
    "labels",
    "map_set",
    "page",
    "tables",
]
