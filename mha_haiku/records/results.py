"""Answers to questions about a model: rows of numbers, and a picture of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mha_haiku.core import display
from mha_haiku.records import tables


class Result:
    """The base of answers, which are shown, drawn and written in the same way.

    Derived classes define `rows`, or `table` where columns have units. Their figure is
    registered with `plots.figure_of`, or a `picture`.

    Attributes:
      title: What was measured, and how.
      file_name: The name of the files that it is saved as, without a suffix.
    """

    title: str
    file_name: str

    _repr_html_, show, plot = display.html, display.show, display.plot
    save = display.save

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r})"

    def rows(self) -> list[dict[str, Any]]:
        """Lists the rows of the table, as dicts by the names of columns."""
        return list(map(dict, self.table().rows))

    def table(self) -> tables.Table:
        """Makes the table."""
        return tables.of_rows(self.rows())

    def text(self, count: int | None = 20) -> str:
        """Writes the first `count` rows of the table as text; None means all rows."""
        return self.table().text(count=count)

    def top(self, count: int = 10) -> list[dict[str, Any]]:
        """Lists the first `count` rows; answers that rank begin with the largest."""
        return self.rows()[:count]

    def writers(self) -> Mapping[str, Callable[[Path], Path]]:
        """Returns what writes other files than tables and pictures, by suffix."""
        return {}
