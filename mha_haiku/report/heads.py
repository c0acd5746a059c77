"""What heads do, as a table of text and as a picture, from numbers per head alone.

L layers, H heads. `means` are those of `training.head_statistics`, or read from a run's
`statistics.npz`: of each statistic by its name `[L, H]`, NaN where a layer has fewer
heads. What is not there is left out.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Means = Mapping[str, np.ndarray]

_POSITIONAL = 0.9  # a larger share makes a head positional (Voita et al. 2019)
_OFFSETS = {
    "largest_at_previous": "-1",
    "largest_at_own": "0",
    "largest_at_next": "+1",
}
# Groups of columns of the table: what is above the group, then above each column.
_GROUPS = (
    (
        "",
        {
            "entropy": "entropy",
            "perplexity": "keys",
            "largest_weight": "largest",
            "distance": "distance",
        },
    ),
    (
        "weight at",
        {
            "previous_position": "-1",
            "own_position": "0",
            "next_position": "+1",
            "first_position": "first",
            "induction": "induction",
        },
    ),
    ("largest at", _OFFSETS),
)
_LEGEND = """\
entropy: of a query's weights, in nats      keys: how many it attends to, exp(entropy)
largest: a query's largest weight           distance: how far it attends, in positions
weight at: the share of attention on the previous (-1), same (0), next (+1) and first
  position{induction}
largest at: the share of queries whose largest weight is there; where that is {most} or
  more, the head is positional (Voita et al. 2019)"""
_INDUCTION = ", and on what followed the same token before (induction)"

# Panels of the picture, row by row: title, and unit beside the colour bar.
_SHARE = "share of attention"
_QUERIES = "share of queries"
_PANELS = (
    {
        "entropy": ("entropy of a query's weights", "nats"),
        "perplexity": ("keys attended to: exp(entropy)", "keys"),
        "largest_weight": ("largest weight of a query", "weight"),
        "squared_weights": ("sum of squared weights", "weight²"),
    },
    {
        "distance": ("mean distance from query to key", "positions"),
        "rms_distance": ("the same, root mean square", "positions"),
        "first_position": ("attention on the first position", _SHARE),
        "received_gini": ("inequality of what keys receive", "Gini coefficient"),
    },
    {
        "previous_position": ("attention on the previous position", _SHARE),
        "own_position": ("attention on the same position", _SHARE),
        "next_position": ("attention on the next position", _SHARE),
        "same_token": ("attention on the same token", _SHARE),
    },
    {
        "largest_at_previous": ("largest weight on the previous position", _QUERIES),
        "largest_at_own": ("largest weight on the same position", _QUERIES),
        "largest_at_next": ("largest weight on the next position", _QUERIES),
        "induction": ("attention on what followed the same token", _SHARE),
    },
    {"chosen_positions": ("attention on the chosen positions", _SHARE)},
)
_IN_UNITS = ("entropy", "perplexity", "distance", "rms_distance")  # not from 0 to 1
_DOTS_PER_INCH = 120
_MOST_NUMBERS = (24, 8)  # layers and heads, up to which cells have numbers in them


def table(means: Means, *, layers: Sequence[int]) -> str:
    """Returns a line of text per head, with a heading and a legend.

    Args:
      means: At least those of the first and last group of columns.
      layers: The number of each layer.
    """
    groups = [
        (title, {name: text for name, text in columns.items() if name in means})
        for title, columns in _GROUPS
    ]
    above, heading = " " * 10, "layer head"
    for title, columns in groups:
        titles = [f"{text:>{_width(text)}}" for text in columns.values()]
        joined = "".join(titles)
        rule = f" {title} ".center(len(joined.strip()), "-") if title else ""
        above += f"{rule:>{len(joined)}}"
        heading += joined
    lines = [above.rstrip(), heading]
    for i, head in np.argwhere(~np.isnan(means["entropy"])).tolist():
        line = f"{layers[i]:>5} {head:>4}"
        for _, columns in groups:
            for name, text in columns.items():
                line += f"{_number(means[name][i, head]):>{_width(text)}}"
        offset = positional(means, i, head)
        lines.append(line + ("" if offset is None else f"  positional ({offset})"))
    said = _INDUCTION if "induction" in means else ""
    legend = _LEGEND.format(induction=said, most=_POSITIONAL)
    return "\n".join([*lines, "", legend])


def positional(means: Means, layer: int, head: int) -> str | None:
    """Returns "-1", "0" or "+1" where a head is positional, else None.

    It is where at least 0.9 of its queries have their largest weight on the previous,
    the same or the next position.

    Source: Voita et al. 2019, section 5.1, https://arxiv.org/abs/1905.09418.
    """
    best = max(_OFFSETS, key=lambda name: means[name][layer, head])
    return _OFFSETS[best] if means[best][layer, head] >= _POSITIONAL else None


def picture(means: Means, *, title: str, layers: Sequence[int]) -> bytes:
    """Returns a heat map of each statistic, heads by layer, as the bytes of a PNG file.

    Args:
      means: What is shown.
      title: Of which run, and over what.
      layers: The number of each layer.
    """
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "text.usetex": False}):
        sheet = _figure(means, title, layers)
        # Without the version of matplotlib, the same numbers give the same file.
        sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def _figure(means: Means, title: str, layers: Sequence[int]) -> "Figure":
    from matplotlib import figure

    rows = [[name for name in row if name in means] for row in _PANELS]
    rows = [row for row in rows if row]
    titles = {name: texts for row in _PANELS for name, texts in row.items()}
    num_layers, num_heads = means[rows[0][0]].shape
    wide, high = 0.42, 0.3
    if not _has_numbers(means[rows[0][0]]):
        wide = high = min(0.24, 6 / max(num_heads, num_layers))
    across, down = max(1.9, wide * num_heads), max(1.0, high * num_layers)
    left, right, gap, heading = 0.6, 1.0, 0.8, 0.75
    columns = max(map(len, rows))
    step = left + across + right
    width, height = columns * step, heading + len(rows) * (down + gap)
    sheet = figure.Figure((width, height), dpi=_DOTS_PER_INCH, facecolor="white")
    for i, row in enumerate(rows):
        for j, name in enumerate(row):
            x, y = j * step + left, height - heading - i * (down + gap) - 0.3 - down
            axes = sheet.add_axes(
                (x / width, y / height, across / width, down / height)
            )
            bar = ((x + across + 0.1) / width, y / height, 0.1 / width, down / height)
            text, unit = titles[name]
            _draw(axes, means[name], name, layers)
            axes.set_title(text, fontsize=9, loc="left")
            colours = sheet.colorbar(axes.get_images()[0], cax=sheet.add_axes(bar))
            colours.set_label(unit, fontsize=7)
            colours.ax.tick_params(labelsize=7)
            colours.set_ticks(colours.mappable.get_clim())
    cells = "A cell is a head: the mean over its queries."
    if np.isnan(means[rows[0][0]]).any():
        cells += " Grey: there is no such head."
    texts = (title, 0.12, 11), (cells, 0.36, 9)
    for text, below, size in texts:
        place = (0.15 / width, 1 - below / height)
        sheet.text(*place, text, va="top", fontsize=size, parse_math=False)
    return sheet


def _draw(axes: "Axes", values: np.ndarray, name: str, layers: Sequence[int]) -> None:
    top = _rounded_up(np.nanmax(values)) if name in _IN_UNITS else 1.0
    axes.set_facecolor("0.9")  # where a layer has fewer heads
    axes.imshow(
        np.ma.masked_invalid(values), vmin=0, vmax=top, cmap="viridis", aspect="auto"
    )
    num_layers, num_heads = values.shape
    for set_ticks, names in (
        (axes.set_xticks, range(num_heads)),
        (axes.set_yticks, layers),
    ):
        every = math.ceil(len(names) / 16)
        set_ticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.tick_params(length=2, pad=2)
    axes.set_xlabel("head", fontsize=8, labelpad=1)
    axes.set_ylabel("layer", fontsize=8, labelpad=2)
    if not _has_numbers(values):
        return
    for (layer, head), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value > 0.6 * top else "white"
            where = {"ha": "center", "va": "center", "color": colour}
            axes.text(head, layer, _number(value), fontsize=7, **where)


def _has_numbers(values: np.ndarray) -> bool:
    return all(
        size <= most for size, most in zip(values.shape, _MOST_NUMBERS, strict=True)
    )


def _rounded_up(value: float) -> float:
    """Returns a number of two digits at which a colour bar may end."""
    if not value > 0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-6) * unit


def _number(value: float) -> str:
    """Returns two decimals below 10, and fewer above."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _width(text: str) -> int:
    return max(6, len(text) + 2)
