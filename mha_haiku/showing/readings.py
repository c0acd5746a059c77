"""Notebook displays of each kind of object; `show` for everything but maps.

L layers, H heads of a layer. Tables have styles only at their elements, and no script.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks, masks
from mha_haiku.core.masks.array_masks import Dense, Segments
from mha_haiku.records import Heads, Result
from mha_haiku.showing import canvas, markup

_MOST_MASK_CELLS = 64  # positions of a mask that are drawn
_MASK_SIDE = 128  # pixels
_MOST_MASKS = 8
_SUFFIXES = ("", ".html", ".htm")  # of pages


@dataclasses.dataclass(frozen=True, repr=False)
class View:
    """A view that a notebook displays, and a browser once it is saved.

    Attributes:
      title: The title.
      html: A complete HTML document, which needs no other file.
      inline: The HTML that a notebook displays.
    """

    title: str
    html: str
    inline: str

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the document, whole or not at all, and returns its path.

        The path is a file, or a folder for `index.html`: one that exists, or whose path
        ends with a slash.

        Raises:
          ConfigError: If it cannot be written.
          ValueError: If the path has the suffix of another kind of file.
        """
        file = checks.as_path(path)
        if checks.is_folder(path):
            file /= "index.html"
        elif file.suffix.lower() not in _SUFFIXES:
            raise ValueError(
                f"path must be a page, which ends with .html, got {str(file)!r}; "
                "mh.plot(...).savefig(path) writes a picture, and save of a verb's "
                "result a table. A folder ends with a slash."
            )
        return checks.write_file(file, self.html)

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.html.encode()):,} bytes)"

    def _repr_html_(self) -> str:
        return self.inline


def view(value: Any, **options: Any) -> View:
    """Shows objects without attention maps; arguments as in `show`."""
    content, title = fragment(value), type(value).__name__
    for name, each in options.items():
        if each is not None:
            raise ValueError(f"{name} must be None for {title}, which has no maps.")
    return View(title, _document(title, content), content)


def _document(title: str, fragment: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "img-src data:; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{markup.escaped(title)}</title></head>\n"
        f'<body style="font-family:sans-serif">{fragment}</body>\n</html>\n'
    )


@functools.singledispatch
def fragment(value: Any) -> markup.Html:
    """Renders an object as HTML without a script."""
    raise TypeError(
        "what is shown must be attention maps, a run or its folder, statistics, "
        f"importance, roles or a mask, got {type(value).__name__}."
    )


@fragment.register
def _(result: Result) -> markup.Html:
    table = result.table()
    names = [column.name for column in table.columns]
    return markup.block(result.title, markup.plain_table(table.texts(), columns=names))


def of_one_layer(heads: Heads) -> markup.Html:
    """Renders a row per number of the heads of one layer."""
    numbers = heads.numbers
    values = np.concatenate([column.mean for column in numbers.values()])
    unknown = np.full_like(heads.mean, np.nan)
    errors = [x.standard_error for x in numbers.values()]
    errors = np.concatenate([unknown if x is None else x for x in errors])
    table = markup.heat_table(
        values,
        rows=[f"{name}, {column.unit}" for name, column in numbers.items()],
        meanings=[column.label for column in numbers.values()],
        scales=[canvas.Scale.of(x.mean, x.unit) for x in numbers.values()],
        titles=with_errors(values, errors),
    )
    notes = "; ".join([*heads.notes, "each row has its own color scale."])
    return markup.block(heads.title, table, note=notes[0].upper() + notes[1:])


@fragment.register
def _(mask: masks.Mask) -> markup.Html:
    sizes = _mask_sizes(mask)
    cells = np.asarray(mask.tile(range(sizes[0]), range(sizes[1])))
    drawn = cells.reshape(-1, *cells.shape[-2:])[:_MOST_MASKS].astype(float)
    image = markup.thumbnails(
        np.where(drawn == 0, np.nan, drawn), columns=_MOST_MASKS, side=_MASK_SIDE
    )
    more = "" if len(drawn) == np.prod(cells.shape[:-2]) else " Of the first ones."
    return markup.block(
        repr(mask),
        markup.picture(image, alt=repr(mask)),
        note=f"Queries down, keys across, the first {sizes[0]} x {sizes[1]}; yellow "
        f"may attend, gray is masked.{more}",
    )


def with_errors(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Formats each number, with its standard error where that is known."""
    text = [
        canvas.number(value) + ("" if np.isnan(error) else f" ± {canvas.number(error)}")
        for value, error in zip(values.ravel(), errors.ravel(), strict=True)
    ]
    return np.array(text, object).reshape(values.shape)


def _mask_sizes(mask: masks.Mask) -> tuple[int, int]:
    """Finds how many queries and keys of a mask are drawn."""
    sizes, others = [], [16]
    for x in jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Dense | Segments)):
        if isinstance(x, Dense):
            sizes.append(np.shape(x.values)[-2:])
        elif isinstance(x, Segments):
            sizes.append((x.query_ids.shape[-1], x.key_ids.shape[-1]))
        elif np.ndim(x):
            others.append(int(np.max(x, initial=0)))
    sizes = np.max(sizes, 0) if sizes else [max(others)] * 2
    return tuple(np.clip(sizes, 1, _MOST_MASK_CELLS).tolist())
