"""HTML that its content cannot break, and numbers in colors.

Small pictures are made without matplotlib: numbers to colors to a PNG file.

A notebook's sanitizer may strip scripts, style sheets and frames, so this HTML has
styles only at its elements, and inherits text color and background from the page.
"""

import base64
import html
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from mha_haiku.records import labels
from mha_haiku.showing import canvas

_MOST_COLUMNS = 16  # up to which cells have their numbers in them
_LONGEST = 200
_GAP = 4  # pixels between thumbnails
_CELL = "padding:2px 6px;text-align:right;border:0;white-space:nowrap"
_NAME = "padding:2px 6px;text-align:left;border:0;font-weight:normal"


# The colors of matplotlib's maps at equal steps, with linear interpolation between.
_VIRIDIS = """
440154 482878 3e4a89 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725
"""
_RED_BLUE = """
053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f
"""


def _stops(text: str) -> np.ndarray:
    return np.array([list(bytes.fromhex(word)) for word in text.split()], float)


_STOPS = {
    "viridis": _stops(_VIRIDIS),
    "viridis_r": _stops(_VIRIDIS)[::-1],
    "RdBu_r": _stops(_RED_BLUE),
}
MASKED = np.array([216, 216, 216], np.uint8)  # a gray that is on neither scale
PAPER = np.array([255, 255, 255], np.uint8)


class Html(str):
    """Text that is HTML already. All other text is escaped by `tag`."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | int) -> Html:
    """Makes an element; attributes and content are escaped, except `Html`.

    Invisible characters become visible symbols.
    """
    inside = "".join(x if isinstance(x, Html) else escaped(x) for x in content)
    pairs = "".join(
        f' {key}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{pairs}>{inside}</{name}>")


def escaped(text: str) -> str:
    """Escapes text as HTML, with symbols for invisible characters."""
    return html.escape(labels.one_line(text))


def block(title: str, *parts: str, note: str = "") -> Html:
    """Puts a title, parts and a note below each other, for a notebook."""
    lines = [tag("div", title, style="font-weight:bold;margin-bottom:4px"), *parts]
    if note:
        lines.append(tag("div", note, style="font-size:smaller;margin-top:4px"))
    return tag("div", *lines, style="overflow-x:auto")


def preformatted(text: str) -> Html:
    """Renders preformatted text, such as a short `repr`."""
    return tag("pre", text, style="margin:0;white-space:pre-wrap")


def heat_table(
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str] | None = None,
    meanings: Sequence[str] = (),
    scales: Sequence[canvas.Scale],
    titles: np.ndarray | None = None,
    texts: np.ndarray | None = None,
    corner: str = "head",
) -> Html:
    """Renders a table whose cells have the colors of their numbers `[R, H]`.

    `corner` describes the columns, which have names or numbers. Tooltips have the
    meaning of a row and the title of a cell (by default its number). `texts` is the
    text in the cells (by default their numbers, unless there are many columns); cells
    of NaN are empty.
    """
    has_room = values.shape[1] <= _MOST_COLUMNS
    head = [tag("th", corner, style=_NAME)]
    names = range(values.shape[1]) if columns is None else columns
    head += [tag("th", str(name), style=_CELL) for name in names]
    lines = [tag("tr", *head)]
    for i, name in enumerate(rows):
        meaning = {"title": meanings[i]} if meanings else {}
        cells = [tag("th", name, style=_NAME, **meaning)]
        for j, number in enumerate(values[i]):
            if np.isnan(number):
                cells.append(tag("td", style=_CELL))
                continue
            text = canvas.number(number) if texts is None else str(texts[i, j])
            color, ink = paint(number, scales[i])
            style = f"{_CELL};background:{color};color:{ink}"
            title = text if titles is None else str(titles[i, j])
            inside = text if has_room or texts is not None else ""
            cells.append(tag("td", inside, style=style, title=title))
        lines.append(tag("tr", *cells))
    return tag("table", *lines, style="border-collapse:collapse;font-size:12px")


def plain_table(rows: Sequence[Sequence[str]], *, columns: Sequence[str] = ()) -> Html:
    """Renders a table of text, the first column aligned left and the others right."""
    lines = (
        [tag("tr", *(tag("th", x, style=_CELL) for x in columns))] if columns else []
    )
    for first, *others in rows:
        cells = [tag("th", first, style=_NAME)]
        cells += [tag("td", text[:_LONGEST], style=_CELL) for text in others]
        lines.append(tag("tr", *cells))
    return tag("table", *lines, style="border-collapse:collapse;font-size:12px")


def picture(image: np.ndarray, *, alt: str) -> Html:
    """Embeds `[height, width, 3]` uint8 in the HTML, with sharp pixels."""
    height, width, _ = image.shape
    content = base64.b64encode(png(image)).decode()
    return Html(
        f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" '
        f'style="image-rendering:pixelated" src="data:image/png;base64,{content}">'
    )


def colors(values: np.ndarray, scale: canvas.Scale) -> np.ndarray:
    """Computes the colors of numbers, `[..., 3]` uint8; gray where they are NaN."""
    stops = _STOPS[scale.colors]
    share = (np.asarray(values, float) - scale.low) / (scale.high - scale.low)
    at = np.clip(np.nan_to_num(share), 0, 1) * (len(stops) - 1)
    places = np.arange(len(stops))
    rgb = np.stack([np.interp(at, places, stops[:, i]) for i in range(3)], -1)
    rgb = np.round(rgb).astype(np.uint8)
    return np.where(np.isnan(share)[..., None], MASKED, rgb)


def paint(value: float, scale: canvas.Scale) -> tuple[str, str]:
    """Computes the color of a number and of text on it, as CSS colors."""
    rgb = colors(np.array(value), scale)
    ink = {"black": "#000", "white": "#fff"}[canvas.ink(rgb / 255.0)]
    return "#" + bytes(rgb.tolist()).hex(), ink


def thumbnails(maps: np.ndarray, *, columns: int, side: int) -> np.ndarray:
    """Draws maps next to each other, on one scale with 0: `[height, width, 3]` uint8.

    Maps are `[N, P, Q]`, with NaN in gray. No side has more pixels than `side`; in
    larger maps a pixel is the largest weight of its cells.
    """
    maps = np.asarray(maps, float)
    largest = canvas.rounded_up(np.nanmax(np.abs(maps), initial=0.0))
    low = -largest if (maps < 0).any() else 0.0
    small = [_shrunk(cells, side) for cells in maps]
    # Cells of small maps are squares of several pixels; a map is at least 1 x 1.
    times = max(1, side // max(small[0].shape))
    small = [cells.repeat(times, 0).repeat(times, 1) for cells in small]
    height, width = small[0].shape
    rows = -(-len(small) // columns)
    across, gap = min(columns, len(small)), _GAP
    sheet = np.empty((rows * (height + gap) - gap, across * (width + gap) - gap, 3))
    sheet[:] = PAPER
    scale = canvas.Scale(low, largest, "RdBu_r" if low else "viridis")
    for i, cells in enumerate(small):
        row, column = divmod(i, columns)
        top, left = row * (height + gap), column * (width + gap)
        # By the square root, as many small weights are seen then.
        drawn = colors(np.sign(cells) * np.sqrt(np.abs(cells) * largest), scale)
        sheet[top : top + height, left : left + width] = drawn
    return sheet.astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """Encodes `[height, width, 3]` uint8 as a PNG file.

    Source: https://www.w3.org/TR/png-3/.
    """
    height, width, _ = image.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first is a filter, 0
    lines[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def _shrunk(values: np.ndarray, side: int) -> np.ndarray:
    """Shrinks a map to `side` cells a side at most, by the largest absolute value."""
    for axis in (0, 1):
        step = -(-values.shape[axis] // side)
        starts = np.arange(0, values.shape[axis], step)
        if step > 1:
            most, least = (
                join.reduceat(values, starts, axis=axis) for join in (np.fmax, np.fmin)
            )
            values = np.where(most >= -least, most, least)
    return values
