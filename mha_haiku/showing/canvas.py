"""The base of all pictures: figures, their files, color scales, and readable ink.

Pictures are drawn without a window and without `pyplot`. The same numbers give the same
PNG file, whatever the version of matplotlib. In vector files text stays text.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mha_haiku.core import checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_logger = logging.getLogger(__name__)

DOTS_PER_INCH = 120
# Left out of files, so that files do not change with the version or the date.
_METADATA = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
# The colors of kinds of heads, where lines and bars tell them apart.
KINDS = {"encoder": "C0", "decoder": "C1", "cross": "C2"}
_MOST_NUMBERS = (24, 8)  # rows and columns, up to which cells have numbers in them
# Units of numbers that may be large or small; all others are shares, from 0 to 1.
_OPEN_UNITS = ("nats", "keys", "positions", "bits", "units of the metric")
_WIDER_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans",
    "WenQuanYi Zen Hei",
    "Arial Unicode MS",
    "Hiragino Sans",
    "Yu Gothic",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Segoe UI Symbol",
)


class Scale(NamedTuple):
    """A mapping of numbers from `low` to `high` to the colors of a color map.

    0 is always on the scale, so that small numbers look small next to large ones. If
    signs differ, 0 is white and in the middle.
    """

    low: float
    high: float
    colors: str

    @classmethod
    def of(cls, values: np.ndarray, unit: str = "nats") -> "Scale":
        """Chooses the scale for some numbers; NaN are ignored.

        A unit that is not among `_OPEN_UNITS` measures a share: the scale goes up to 1.
        """
        finite = values[np.isfinite(values)]
        top = rounded_up(np.abs(finite).max(initial=0.0))
        if (finite < 0).any() and (finite > 0).any():
            return cls(-top, top, "RdBu_r")
        if (finite < 0).any():
            return cls(-top, 0.0, "viridis_r")
        if unit not in _OPEN_UNITS:
            top = max(1.0, top)
        return cls(0.0, top, "viridis")

    def ink(self, value: float) -> str:
        """Chooses "black" or "white", whichever contrasts more with the color."""
        import matplotlib

        share = (value - self.low) / (self.high - self.low)
        return ink(np.array(matplotlib.colormaps[self.colors](share)[:3]))


def ink(color: np.ndarray) -> str:
    """Chooses "black" or "white" for more contrast with red, green and blue."""
    # Relative luminance, and the contrasts that follow from it; WCAG 2.1.
    linear = np.where(color <= 0.04045, color / 12.92, (color + 0.055) / 1.055)
    linear = np.where(color <= 0.04045, linear, linear**2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


def is_possible() -> bool:
    """Checks whether pictures can be drawn; logs a warning if they cannot."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    _logger.warning(
        "No pictures: matplotlib is missing (pip install 'mha_haiku[plots]')."
    )
    return False


def formats_of(formats: str | Sequence[str]) -> tuple[str, ...]:
    """Lists file formats, which matplotlib, if installed, can write, in lower case.

    A string is one format.
    """
    listed = [formats] if isinstance(formats, str) else formats
    lower = tuple(x.lower() if isinstance(x, str) else x for x in listed)
    if offered := known_formats():
        for each in lower:
            checks.choice("formats", each, offered)
    return lower


def known_formats() -> list[str]:
    """Returns the file formats of matplotlib, none if it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from matplotlib import backend_bases

    return sorted(backend_bases.FigureCanvasBase.get_supported_filetypes())


def content(draw: Callable[[], "Figure"], format: str = "png") -> bytes:
    """Draws a figure, and returns the bytes of its file in a format."""
    with style():
        return _content(draw(), format)


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Sets, while entered, the fonts of figures and how text is written to files."""
    import matplotlib

    settings: dict[Any, Any] = {
        "font.family": list(fonts()[0]),
        "text.usetex": False,
        "svg.fonttype": "none",  # text as text
        "svg.hashsalt": "mha_haiku",  # names of parts that do not change
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Characters that no font has are replaced by their code points beforehand;
        # shaping may still ask for other glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def sheet(width: float, height: float, *, title: str = "", note: str = "") -> "Figure":
    """Makes an empty figure of a size in inches with automatic layout.

    The title is above all axes, on the left, and the note is a line below it.
    """
    result = figure_class()((width, height), dpi=DOTS_PER_INCH, layout="constrained")
    wide = max(30, int(13 * width))
    lines = (textwrap.fill(line, wide) for line in (title, note) if line)
    text = "\n".join(lines)
    if text:
        result.suptitle(text, fontsize=10, ha="left", x=0.01, parse_math=False)
    return result


def dark() -> None:
    """Gives all later figures a dark background."""
    from matplotlib import style

    ground: dict[Any, Any] = dict.fromkeys(
        ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#14171c"
    )
    style.use(["dark_background", ground])


def absent() -> str:
    """Returns the gray of absent cells, on the background of figures."""
    import matplotlib
    from matplotlib import colors

    ground = colors.to_rgb(matplotlib.rcParams["figure.facecolor"])
    return "0.88" if sum(ground) > 1.5 else "0.3"


@functools.cache
def figure_class() -> type["Figure"]:
    """Derives a class of matplotlib's figure that keeps our `style` in its files.

    A notebook displays it, although it has no window.
    """
    from matplotlib import figure

    class Figure(figure.Figure):
        def savefig(self, *args: Any, **options: Any):
            with style():
                super().savefig(*args, **options)

        def _repr_png_(self):
            return _content(self, "png")

    return Figure


def _content(figure: "Figure", kind: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, metadata=_METADATA.get(kind))
    return content.getvalue()


def heat_map(
    axes: "Axes",
    values: np.ndarray,
    scale: Scale,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    unit: str,
    texts: np.ndarray | None = None,
) -> None:
    """Draws numbers `[R, C]` in colors, with their color bar; NaN is gray.

    Cells show texts, by default the numbers if there are few.
    """
    axes.set_facecolor(absent())
    image = axes.imshow(
        np.ma.masked_invalid(values),
        vmin=scale.low,
        vmax=scale.high,
        cmap=scale.colors,
        aspect="auto",
    )
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(unit, fontsize=7)
    bar.ax.tick_params(labelsize=7)
    bar.set_ticks(sorted({scale.low, 0.0, scale.high}))
    style = {"fontsize": 7, "parse_math": False}
    axes.set_yticks(range(len(rows)), rows, **style)
    if max(map(len, columns), default=0) > 2:
        style |= {"rotation": 45, "ha": "right"}
    axes.set_xticks(range(len(columns)), columns, **style)
    axes.tick_params(length=2, pad=2)
    if texts is None and any(np.greater(values.shape, _MOST_NUMBERS)):
        return
    style = {"ha": "center", "va": "center", "fontsize": 7, "parse_math": False}
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            text = number(value) if texts is None else str(texts[i, j])
            axes.text(j, i, text, color=scale.ink(value), **style)


def rounded_up(value: float) -> float:
    """Rounds up to two digits, for the end of a scale; 1 for 0."""
    if not value > 0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-6) * unit


def number(value: float) -> str:
    """Formats a number: two decimals below 10, fewer above, two digits if small."""
    size = abs(value)
    if 0 < size < 0.005:
        return f"{value:.1g}"
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


@functools.cache
def fonts() -> tuple[tuple[str, ...], Callable[[str], bool]]:
    """Finds the font families in use, and a test of whether one has a character."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    families = ("DejaVu Sans", *(name for name in _WIDER_FONTS if name in installed))
    available = [
        font_manager.get_font(font_manager.findfont(name)) for name in families
    ]

    @functools.cache
    def has_glyph(character: str) -> bool:
        return any(font.get_char_index(ord(character)) for font in available)

    return families, has_glyph


def frames(axes: "Axes", cells: np.ndarray) -> None:
    """Draws lines around groups of true cells `[P, Q]` of a map that touch."""
    from matplotlib import collections

    rim = np.pad(cells, 1)
    # A line lies between two cells of which one is true: below or above, left or right.
    below = np.argwhere(rim[1:, 1:-1] != rim[:-1, 1:-1]) - 0.5
    beside = np.argwhere(rim[1:-1, 1:] != rim[1:-1, :-1]) - 0.5
    lines = [((x, y), (x + 1, y)) for y, x in below.tolist()]
    lines += [((x, y), (x, y + 1)) for y, x in beside.tolist()]
    for width, color in ((3.0, "black"), (1.5, "#ff5a1f")):
        axes.add_collection(
            collections.LineCollection(
                lines, colors=color, linewidths=width, capstyle="projecting"
            ),
            autolim=False,
        )
