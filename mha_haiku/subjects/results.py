"""Results of verbs with a table and a picture: shown as text, and written."""

import abc
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mha_haiku.core import checks, display
from mha_haiku.records import Heads, tables
from mha_haiku.showing import drawing, plotting
from mha_haiku.training.runs import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(abc.ABC):
    """A table, and a picture of it."""

    _repr_html_, show, plot = display.html, display.show, display.plot

    file_name: str  # without a suffix
    title: str  # of what, and how it was measured
    picture: Callable[[], "Figure"]  # draws it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r})"

    @abc.abstractmethod
    def table(self) -> tables.Table:
        """Returns the numbers in rows."""

    def text(self) -> str:
        """Writes the table as text."""
        return self.table().text()

    def save(
        self, path: str | os.PathLike, formats: str | Sequence[str] = ("png",)
    ) -> list[Path]:
        """Writes the table as .csv and the picture in each format; returns the paths.

        Without matplotlib there is no picture.

        Args:
          path: A folder, for all files; or one file, whose suffix says what is written:
            the table for .csv, a format of matplotlib for the picture. A path that ends
            with a slash is a folder.
          formats: Formats of the pictures in a folder, or one of them.

        Raises:
          ConfigError: If a file cannot be written.
          ValueError: If nothing of this result has the path's suffix, or matplotlib
            lacks a format; then nothing is written.
        """
        is_folder, path = checks.is_folder(path), checks.as_path(path)
        if is_folder or not path.suffix:
            return self._write_all(path, formats)
        writers, suffix = self._writers(), path.suffix.lower()
        offered = [*writers, *(f".{kind}" for kind in drawing.known_formats())]
        if suffix not in offered:
            raise ValueError(
                "path must be a folder, or a file that ends with one of "
                f"{', '.join(offered)}; got {str(path)!r}. A folder with a dot in its "
                "name ends with a slash."
            )
        write = writers.get(suffix, functools.partial(_write_picture, self.picture))
        return [write(path)]

    def _writers(self) -> dict[str, Callable[[Path], Path]]:
        """Returns what writes a file, by its suffix, but for pictures."""
        return {".csv": lambda path: files.write(path, self.table().csv())}

    def _write_all(self, folder: Path, formats: str | Sequence[str]) -> list[Path]:
        formats = drawing.formats_of(formats)
        table, *others = self._writers().items()
        path = folder / f"{self.file_name}.csv"
        written = [table[1](path), *write_pictures(path, self.picture, formats)]
        return [*written, *(write(path.with_suffix(x)) for x, write in others)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadResult(Heads, Result):
    """Numbers per head that a verb has measured."""

    @property
    def picture(self) -> functools.partial:
        """Draws the roles of heads, or the columns."""
        return functools.partial(plotting.figure_of, self, title=None)

    def _writers(self) -> dict[str, Callable[[Path], Path]]:
        """Writes the record as .npz too, for pages of maps."""
        return super()._writers() | {".npz": self.write}


def write_pictures(
    path: Path, picture: Callable[[], "Figure"], formats: str | Sequence[str]
) -> list[Path]:
    """Draws a picture in each format, with its suffix; none without matplotlib."""
    formats = drawing.formats_of(formats)
    if not drawing.is_possible():
        return []
    return [_write_picture(picture, path.with_suffix(f".{kind}")) for kind in formats]


def _write_picture(picture: Callable[[], "Figure"], path: Path) -> Path:
    """Draws a picture in the format that the path's suffix names."""
    return files.write(path, drawing.content(picture, path.suffix[1:].lower()))


def command(script: str, root: str | os.PathLike) -> str:
    """Formats the command line of a script for a run's folder, for a message."""
    root = Path(root)
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    return f"python -m mha_haiku {script} --workdir={root}"
