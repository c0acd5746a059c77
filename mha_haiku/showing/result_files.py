"""Writing results: a table as CSV, and its picture; see `display.save`."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mha_haiku.core import checks
from mha_haiku.records import Result
from mha_haiku.showing import canvas, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(
    result: Result, path: str | os.PathLike, formats: str | Sequence[str]
) -> list[Path]:
    """Writes a result; see `display.save`."""
    writers: dict[str, Callable[[Path], Path]] = {
        ".csv": lambda path: checks.write_file(path, result.table().csv()),
        **result.writers(),
    }
    picture = functools.partial(plots.figure_of, result, title=None)
    is_folder, path = checks.is_folder(path), checks.as_path(path)
    if is_folder or not path.suffix:
        formats = canvas.formats_of(formats)  # before anything is written
        path = path / f"{result.file_name}.csv"
        table, *others = [(path.with_suffix(x), write) for x, write in writers.items()]
        written = [table[1](table[0]), *write_pictures(path, picture, formats)]
        return [*written, *(write(path) for path, write in others)]
    suffix = path.suffix.lower()
    offered = [*writers, *(f".{kind}" for kind in canvas.known_formats())]
    if suffix not in offered:
        raise ValueError(
            "path must be a folder, or a file that ends with one of "
            f"{', '.join(offered)}; got {str(path)!r}. A folder with a dot in its "
            "name ends with a slash."
        )
    return [writers.get(suffix, functools.partial(_write_picture, picture))(path)]


def write_pictures(
    path: Path, picture: Callable[[], "Figure"], formats: str | Sequence[str]
) -> list[Path]:
    """Draws a picture in each format, with its suffix; none without matplotlib."""
    formats = canvas.formats_of(formats)
    if not canvas.is_possible():
        return []
    return [_write_picture(picture, path.with_suffix(f".{kind}")) for kind in formats]


def _write_picture(picture: Callable[[], "Figure"], path: Path) -> Path:
    return checks.write_file(path, canvas.content(picture, path.suffix[1:].lower()))
