"""Numbers in rows and columns that have names: a table for notebooks, and a figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mha_haiku.showing import drawing, markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHARES = ("probability", "score")


class Grid(NamedTuple):
    """Numbers in rows and columns that have names.

    Attributes:
      values: The numbers; NaN where there is none.
      rows: The name of each row.
      columns: The name of each column.
      unit: The unit of the numbers.
      title: What they are.
      caption: The title of the table, which may say more; "": the title.
      note: What stands below the table.
      texts: What stands in the cells, of the shape of the numbers; None: the numbers.
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    title: str
    caption: str = ""
    note: str = ""
    texts: np.ndarray | None = None

    def html(self) -> markup.Html:
        """Renders the table that a notebook shows."""
        table = markup.heat_table(
            self.values,
            rows=self.rows,
            columns=self.columns,
            scales=[self._scale()] * len(self.rows),
            shown=self.texts,
        )
        return markup.block(self.caption or self.title, table, note=self.note)

    def figure(self, title: str | None) -> "Figure":
        """Draws the figure that `mh.plot` returns; None: with the grid's title."""
        cell = 0.4
        if self.texts is not None:
            cell = max(0.75, 0.07 * max(map(len, self.texts.flat), default=0))
        width = max(4.0, cell * len(self.columns) + 2)
        height = max(2.0, 0.3 * len(self.rows) + 1.4)
        sheet = drawing.sheet(width, height, title=title or self.title)
        self.draw(sheet.subplots())
        return sheet

    def draw(self, axes: "Axes") -> None:
        """Draws the cells and their colour bar."""
        drawing.heat_map(
            axes,
            self.values,
            self._scale(),
            rows=self.rows,
            columns=self.columns,
            unit=self.unit,
            texts=self.texts,
        )

    def _scale(self) -> drawing.Scale:
        return drawing.Scale.of(
            self.values, self.unit if self.unit in _SHARES else "nats"
        )
