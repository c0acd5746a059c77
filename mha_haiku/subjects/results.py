"""Results of verbs with a table and a picture: shown as text, and written."""

import abc
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mha_haiku.core import checks
from mha_haiku.records import Heads, tables
from mha_haiku.showing import drawing, head_figures
from mha_haiku.training.runs import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(abc.ABC):
    """A table, and a picture of it."""

    file_name: str  # without a suffix
    title: str  # of what, and how it was measured
    picture: Callable[[], "Figure"]  # draws it

    @abc.abstractmethod
    def table(self) -> tables.Table:
        """Returns the numbers in rows."""

    def text(self) -> str:
        """Writes the table as text."""
        return self.table().text()

    def save(
        self, folder: str | os.PathLike, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Writes the table as .csv and the picture in each format; returns the paths.

        Without matplotlib there is no picture.
        """
        path = checks.as_path(folder) / f"{self.file_name}.csv"
        path = files.write(path, self.table().csv())
        return [path, *write_pictures(path, self.picture, formats)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeadResult(Heads, Result):
    """Numbers per head that a verb has measured."""

    @property
    def picture(self) -> functools.partial:
        """Draws the columns."""
        return functools.partial(head_figures.picture, self)

    def save(
        self, folder: str | os.PathLike, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Writes the record as .npz too, for pages of maps."""
        written = super().save(folder, formats)
        return [*written, self.write(written[0].with_suffix(".npz"))]


def write_pictures(
    path: Path, picture: Callable[[], "Figure"], formats: Sequence[str]
) -> list[Path]:
    """Draws a picture in each format, with its suffix; none without matplotlib."""
    if not drawing.is_possible():
        return []
    return [
        files.write(path.with_suffix(f".{kind}"), drawing.content(picture, kind))
        for kind in formats
    ]


def command(script: str, root: str | os.PathLike) -> str:
    """Formats the command line of a script for a run's folder, for a message."""
    root = Path(root)
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    return f"python -m mha_haiku {script} --workdir={root}"
