"""HTML that cannot be broken by what stands in it, and tables of numbers in colours.

A notebook's cleaner may strip scripts, style sheets and frames: what is made here has
styles at its elements alone, and takes ink and paper from the page around it.
"""

import html
from collections.abc import Sequence

import numpy as np

from mha_haiku.report import drawing, labels
from mha_haiku.viewing import pixels

_MOST_COLUMNS = 16  # up to which cells have their numbers in them
_LONGEST = 200
_CELL = "padding:2px 6px;text-align:right;border:0;white-space:nowrap"
_NAME = "padding:2px 6px;text-align:left;border:0;font-weight:normal"


class Html(str):
    """Text that is HTML already. All other text is escaped by `tag`."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | int) -> Html:
    """Returns an element.

    Args:
      name: Its name.
      *content: What stands in it: `Html` as it is, text escaped, with visible symbols
        for characters that are invisible.
      **attributes: Its attributes, escaped.
    """
    inside = "".join(x if isinstance(x, Html) else escaped(x) for x in content)
    given = "".join(
        f' {key}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{inside}</{name}>")


def escaped(text: str) -> str:
    """Returns text as HTML that shows it, with symbols for invisible characters."""
    return html.escape(labels.one_line(text))


def block(title: str, *parts: str, note: str = "") -> Html:
    """Returns what a notebook shows: a title, the parts below it, and a note."""
    lines = [tag("div", title, style="font-weight:bold;margin-bottom:4px"), *parts]
    if note:
        lines.append(tag("div", note, style="font-size:smaller;margin-top:4px"))
    return tag("div", *lines, style="overflow-x:auto")


def preformatted(text: str) -> Html:
    """Returns text as it is, such as a short `repr`."""
    return tag("pre", text, style="margin:0;white-space:pre-wrap")


class Column(str):
    """A name of columns or rows with what it means, shown where one points at it."""

    meaning = ""

    @classmethod
    def of(cls, name: str, meaning: str) -> "Column":
        """Returns the name with its meaning."""
        column = cls(name)
        column.meaning = meaning
        return column


def heat_table(
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    corner: str = "",
    scales: Sequence[drawing.Scale],
    titles: np.ndarray | None = None,
    shown: np.ndarray | None = None,
) -> Html:
    """Returns a table whose cells have the colours of their numbers.

    Args:
      values: `[R, C]`; NaN where there is nothing.
      rows: The name of each row.
      columns: The name of each column.
      corner: What rows and columns are.
      scales: The colour scale of each row.
      titles: `[R, C]` text that a cell shows where one points at it; None: its number.
      shown: `[R, C]` text in the cells; None: their numbers, where there is room.
    """
    has_room = len(columns) <= _MOST_COLUMNS
    head = [tag("th", corner, style=_NAME)]
    head += [tag("th", name, style=_CELL) for name in columns]
    lines = [tag("tr", *head)]
    for i, name in enumerate(rows):
        meaning = getattr(name, "meaning", "")
        cells = [
            tag("th", name, style=_NAME, **({"title": meaning} if meaning else {}))
        ]
        for j, number in enumerate(values[i]):
            if np.isnan(number):
                cells.append(tag("td", style=_CELL))
                continue
            text = drawing.number(number) if shown is None else str(shown[i, j])
            colour, ink = pixels.paint(number, scales[i])
            style = f"{_CELL};background:{colour};color:{ink}"
            title = text if titles is None else str(titles[i, j])
            inside = text if has_room or shown is not None else ""
            cells.append(tag("td", inside, style=style, title=title))
        lines.append(tag("tr", *cells))
    return tag("table", *lines, style="border-collapse:collapse;font-size:12px")


def plain_table(rows: Sequence[Sequence[str]], *, columns: Sequence[str] = ()) -> Html:
    """Returns a table of text, its first column to the left and others to the right."""
    lines = (
        [tag("tr", *(tag("th", x, style=_CELL) for x in columns))] if columns else []
    )
    for first, *others in rows:
        cells = [tag("th", first, style=_NAME)]
        cells += [tag("td", text[:_LONGEST], style=_CELL) for text in others]
        lines.append(tag("tr", *cells))
    return tag("table", *lines, style="border-collapse:collapse;font-size:12px")


def picture(png: bytes, *, alt: str, width: int, height: int) -> Html:
    """Returns a PNG file's picture, inside the HTML, its pixels kept sharp."""
    return Html(
        f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" '
        f'style="image-rendering:pixelated" src="{pixels.address(png)}">'
    )
