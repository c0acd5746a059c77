"""Tables: rows of named columns with units, as aligned text or a CSV file."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Formats of a mean with its standard error, and of the ends of an interval.
WITH_ERROR = "{:.4g} ± {:.2g}"
RANGE = "{:.0f}-{:.0f}"


class Column(NamedTuple):
    """A column.

    Attributes:
      name: The key of its cells in a row, and its heading.
      unit: Shown below the heading.
      shown: The format of a cell in text, for `str.format`.
      csv: The headers of its columns in a CSV file, one for each part of a tuple cell.
        Defaults to its name.
    """

    name: str
    unit: str = ""
    shown: str = "{}"
    csv: tuple[str, ...] | None = None


class Table(NamedTuple):
    """Rows of named columns.

    Attributes:
      columns: The columns, in order.
      rows: Cells by the names of columns; missing cells, None and NaN are empty.
      num_keys: The number of first columns that identify a row.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    num_keys: int = 1

    def text(self, width: int = 100, *, count: int | None = None) -> str:
        """Formats the first `count` rows, or all, as text with aligned columns.

        If columns do not fit in `width` characters, they are split into blocks, one
        below the other, which all begin with the columns that identify a row.
        """
        if not self.columns:
            return "There are no rows."
        if count is not None and len(self.rows) > count:
            rest = f"... and {len(self.rows) - count:,} more rows; count=None shows all"
            return f"{self._replace(rows=self.rows[:count]).text(width)}\n{rest}"
        keys, others = self.columns[: self.num_keys], self.columns[self.num_keys :]
        keys = [self._aligned(column) for column in keys]
        width_of_keys = sum(len(lines[0]) for lines in keys)
        blocks, room = [[*keys]], width - width_of_keys
        for lines in map(self._aligned, others):
            size = len(lines[0])
            if size > room and len(blocks[-1]) > len(keys):
                blocks.append([*keys])
                room = width - width_of_keys
            blocks[-1].append(lines)
            room -= size
        return "\n\n".join(map(_joined, blocks))

    def texts(self) -> list[list[str]]:
        """Formats the cells of each row, as `text` does."""
        return [[_shown(x, row.get(x.name)) for x in self.columns] for row in self.rows]

    def csv(self) -> str:
        """Formats the table as CSV: a line of names, and a line per row."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [column.csv or (column.name,) for column in self.columns]
        writer.writerow([name for parts in names for name in parts])
        for row in self.rows:
            cells = []
            for column, parts in zip(self.columns, names, strict=True):
                cell = row.get(column.name)
                cells += cell if isinstance(cell, tuple) else [cell] * len(parts)
            writer.writerow(map(_plain, cells))
        return text.getvalue()

    def _aligned(self, column: Column) -> list[str]:
        """Aligns a column's lines to one width."""
        cells = [row.get(column.name) for row in self.rows]
        lines = [column.name, column.unit, *(_shown(column, cell) for cell in cells)]
        size = 2 + max(map(len, lines))
        is_text = any(isinstance(cell, str) for cell in cells)
        if is_text:
            return ["  " + line.ljust(size - 2) for line in lines]
        return [line.rjust(size) for line in lines]


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Makes the table of rows, with a column for each name that has a cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [
        Column(name, shown="{:.4g}" if isinstance(cells[0], float) else "{}")
        for name in names
        if (cells := [x for row in rows if not _is_nothing(x := row.get(name))])
    ]
    return Table(columns, rows)


def _joined(block: Sequence[Sequence[str]]) -> str:
    """Joins columns, with a line of units if any has one."""
    names, units, *rows = (
        "".join(cells).rstrip() for cells in zip(*block, strict=True)
    )
    return "\n".join([names, *([units] if units else []), *rows])


def _shown(column: Column, cell: Any) -> str:
    parts = cell if isinstance(cell, tuple) else (cell,)
    if _is_nothing(parts[0]):
        return ""
    if _is_nothing(parts[-1]):  # the standard error of a single example
        first = column.shown[: column.shown.index("}") + 1]
        return first.format(parts[0])
    return column.shown.format(*parts)


def _plain(cell: Any) -> Any:
    if _is_nothing(cell):
        return ""
    return f"{cell:.9g}" if isinstance(cell, float) else cell


def _is_nothing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))
