"""The `View`: a page, in a notebook and in a file."""

import dataclasses
import os
from pathlib import Path

from mha_haiku.showing import markup
from mha_haiku.training.runs import files


@dataclasses.dataclass(frozen=True, repr=False)
class View:
    """Something to look at: in a notebook by itself, in a browser once saved.

    Attributes:
      title: What it is.
      html: A whole HTML document, which asks for no other file.
      inline: What a notebook shows, as HTML.
    """

    title: str
    html: str
    inline: str

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the document, whole or not at all, and returns the path.

        Raises:
          ConfigError: If it cannot be written.
        """
        return files.write(path, self.html)

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.html.encode()):,} bytes)"

    def _repr_html_(self) -> str:
        return self.inline


def document(title: str, fragment: str) -> str:
    """Returns a whole HTML document around a fragment that has no script."""
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{markup.escaped(title)}</title></head>\n"
        f'<body style="font-family:sans-serif">{fragment}</body>\n</html>\n'
    )
