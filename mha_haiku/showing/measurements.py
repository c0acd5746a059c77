"""Tables and figures of named rows and columns of numbers, and of heads.

L layers, H heads of a layer, T positions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mha_haiku import records
from mha_haiku.records import tables
from mha_haiku.records.heads import ROLE
from mha_haiku.showing import canvas, head_figures, markup, plots, readings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_WITH_ERRORS = 16  # heads of a layer
_SHARES = ("probability", "score")  # units with colors from 0 to 1


class Grid(NamedTuple):
    """Numbers in named rows and columns.

    Attributes:
      values: The numbers; NaN where there is none.
      rows: The name of each row.
      columns: The name of each column.
      unit: The unit of the numbers.
      title: A title of the numbers.
      note: A note below the table.
      texts: Texts of the cells, of the shape of the numbers. Defaults to the numbers.
      titles: Tooltips of the cells. Defaults to their texts.
      axes: Names of the rows and the columns.
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    title: str
    note: str = ""
    texts: np.ndarray | None = None
    titles: np.ndarray | None = None
    axes: tuple[str, str] = ("", "")

    def html(self) -> markup.Html:
        """Renders the table that a notebook shows."""
        table = markup.heat_table(
            self.values,
            rows=self.rows,
            columns=self.columns,
            scales=[self._scale()] * len(self.rows),
            titles=self.titles,
            texts=self.texts,
            corner=self.axes[1],
        )
        return markup.block(self.title, table, note=self.note)

    def figure(self, title: str | None) -> "Figure":
        """Draws the figure of `mh.plot`; the title defaults to the grid's title."""
        cell = 0.4
        if self.texts is not None:
            cell = max(0.75, 0.07 * max(map(len, self.texts.flat), default=0))
        width = max(4.0, cell * len(self.columns) + 2)
        height = max(2.0, 0.3 * len(self.rows) + 1.4)
        sheet = canvas.sheet(width, height, title=title or self.title)
        self.draw(sheet.subplots())
        return sheet

    def draw(self, axes: "Axes") -> None:
        """Draws the cells and their color bar."""
        canvas.heat_map(
            axes,
            self.values,
            self._scale(),
            rows=self.rows,
            columns=self.columns,
            unit=self.unit,
            texts=self.texts,
        )
        axes.set(ylabel=self.axes[0], xlabel=self.axes[1])

    def _scale(self) -> canvas.Scale:
        unit = self.unit if self.unit in _SHARES else "nats"
        return canvas.Scale.of(self.values, unit)


def visible(text: str) -> str:
    """Strips a token, or shows its spaces if there is nothing else."""
    text = str(text)
    return text.strip() or repr(text)[1:-1].replace(" ", "␣")


def rows_table(rows: Iterable[Mapping[str, Any]], digits: int) -> markup.Html:
    """Renders rows as a table, numbers rounded to digits and texts as tokens."""
    rows = list(rows)
    names = [column.name for column in tables.of_rows(rows).columns]
    values = [[row.get(name, "") for name in names] for row in rows]
    cells = [
        [f"{x:.{digits}g}" if isinstance(x, float) else visible(x) for x in row]
        for row in values
    ]
    return markup.plain_table(cells, columns=names)


def shows(kind: type, grid: Callable[[Any], Grid]) -> None:
    """Registers the grid of a class's numbers, to show and draw its objects."""
    readings.fragment.register(kind, lambda value: grid(value).html())
    plots.figure_of.register(kind, lambda value, *, title: grid(value).figure(title))


def _of_heads(heads: records.Heads) -> Grid:
    """Makes the grid of the roles of heads, or of the first column."""
    name = ROLE if ROLE in heads else next(iter(heads))
    column = heads[name]
    if not column.mean.size:
        raise ValueError("there are no heads.")
    values, texts, titles = column.mean, None, None
    note = f"{name}: {column.label}{column.unit and ', '}{column.unit}"
    if column.names is not None:
        names = np.asarray(column.names)
        scores = ["" if np.isnan(x) else f" {x:.2f}" for x in values.flat]
        texts = np.char.add(names.astype(str), np.reshape(scores, names.shape))
        values = np.where(names == "", np.nan, np.nan_to_num(values))
    elif column.standard_error is not None:
        titles = readings.with_errors(values, column.standard_error)
        texts = titles if values.shape[1] <= _MOST_WITH_ERRORS else None
        note += ", mean ± standard error"
    return Grid(
        values,
        [layer.name for layer in heads.layers],
        list(map(str, range(values.shape[1]))),
        column.unit,
        title=heads.title,
        note="; ".join([note, *heads.notes]),
        texts=texts,
        titles=titles,
        axes=("layer", "head"),
    )


@readings.fragment.register
def _(heads: records.Heads) -> markup.Html:
    """Shows one column as cells, and all columns in a folded table."""
    if len(heads.layers) == 1 and len(heads.numbers) > 1:
        return readings.of_one_layer(heads)
    cells = _of_heads(heads).html()
    if len(heads.columns) == 1:
        return cells
    summary = markup.tag("summary", f"{len(heads.columns)} columns")
    table = markup.preformatted(heads.text())
    return markup.Html(cells + markup.tag("details", summary, table))


@plots.figure_of.register(records.Heads)
def _(heads: records.Heads, *, title: str | None) -> "Figure":
    if heads.first.names is not None:
        return _of_heads(heads).figure(title)
    return head_figures.picture(heads, title=title)


def bars(
    names: Sequence[str], values: Sequence[float], label: str, *, title: str
) -> "Figure":
    """Draws a horizontal bar for each number, from above."""
    sheet = canvas.sheet(6.5, max(1.8, 0.22 * len(names) + 1.2), title=title)
    axes = sheet.subplots()
    colors = ["tab:red" if value > 0 else "tab:blue" for value in values]
    axes.barh(range(len(names)), values, color=colors)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_xlabel(label)
    return sheet
