"""Attention maps beside each other in one figure, for a paper: a grid of heads.

P query and Q key bins, which are single positions in a whole map.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mha_haiku.report import drawing, labels
from mha_haiku.report.dossier import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALES = ("linear", "root", "log")
_MOST_TOKENS = 64  # positions, up to which axes show tokens
_MOST_LINEAR = 32  # keys, above which most weights are small
_LONGEST_TOKEN = 16
_SIDE = 2.2  # inches of a panel


class Panel(NamedTuple):
    """The map of one head.

    Attributes:
      title: Above it.
      weights: `[P, Q]`.
      masked: Booleans `[P, Q]`, drawn grey; None: no cell.
      aligned: Booleans `[P, Q]`, drawn with a frame; None: no cell.
    """

    title: str
    weights: np.ndarray
    masked: np.ndarray | None = None
    aligned: np.ndarray | None = None


def figure(
    panels: Sequence[Panel],
    *,
    queries: Axis,
    keys: Axis,
    columns: int | None = None,
    colours: str = "viridis",
    scale: str | None = None,
    size: tuple[float, float] | None = None,
    title: str = "",
) -> "Figure":
    """Draws maps of the same queries and keys, on one colour scale.

    Args:
      panels: At least one.
      queries: Down the side; tokens are shown up to 64 positions.
      keys: Along the bottom.
      columns: Panels beside each other; None: a grid near a square.
      colours: A colour map of matplotlib.
      scale: "linear", "root" (small weights are seen) or "log" (very small ones too);
        None: "linear" up to 32 keys, else "root".
      size: Width and height in inches; None: by the number of panels.
      title: Above all of them.

    Returns:
      A figure that belongs to no window.
    """
    columns = columns or _columns(len(panels))
    rows = -(-len(panels) // columns)
    if size is None:
        tall = _SIDE * min(3.0, max(0.3, queries.bins / keys.bins))
        size = (columns * _SIDE + 1.6, rows * (tall + 0.3) + 0.7)
    if scale is None:
        scale = "linear" if keys.bins <= _MOST_LINEAR else "root"
    norm = _norm(panels, scale)

    sheet = drawing.sheet(*size, title=_literal(title, 200))
    grid = sheet.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes, panel in zip(grid.flat, panels, strict=False):
        hidden = np.isnan(panel.weights)
        if panel.masked is not None:
            hidden = hidden | (panel.masked & (panel.weights == 0))
        axes.set_facecolor(drawing.absent())
        image = axes.imshow(
            np.ma.masked_array(panel.weights.astype(np.float32), hidden),
            norm=norm,
            cmap=colours,
            interpolation="nearest",
        )
        if panel.aligned is not None:
            drawing.frames(axes, panel.aligned)
        name = _literal(panel.title, 40)
        axes.set_title(name, fontsize=9, parse_math=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        _label(axes, queries, "y", size[1] / rows)
        axes.set_ylabel(_named("query", queries), fontsize=8)
    for i in range(columns):
        last = (len(panels) - 1 - i) // columns  # the lowest panel of the column
        axes = grid[last, i]
        _label(axes, keys, "x", size[0] / columns)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(_named("key", keys), fontsize=8)
    bar = sheet.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8)
    how = {"linear": "", "root": " (square-root scale)", "log": " (log scale)"}
    bar.set_label(f"attention weight{how[scale]}", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return sheet


def _named(side: str, axis: Axis) -> str:
    return f"{side}: {axis.label}" if axis.label else side


def _columns(count: int) -> int:
    return count if count <= 4 else math.ceil(math.sqrt(count))


def _norm(panels, scale):
    from matplotlib import colors

    largest = max(float(np.nanmax(x.weights, initial=0.0)) for x in panels)
    top = drawing.rounded_up(largest)
    if scale == "log":
        return colors.LogNorm(1e-4 * top, top, clip=True)
    return colors.PowerNorm(1.0 if scale == "linear" else 0.5, vmin=0.0, vmax=top)


def _label(axes: "Axes", axis: Axis, which: str, inches: float) -> None:
    """Names the bins along one side: by tokens where there is room, else by number."""
    bins = axis.bins
    set_ticks = axes.set_xticks if which == "x" else axes.set_yticks
    has_tokens = any(axis.tokens) and not axis.is_pooled and bins <= _MOST_TOKENS
    if has_tokens:
        names = [_literal(labels.visible(x), _LONGEST_TOKEN) for x in axis.tokens]
        points = max(3.0, min(9.0, 72 * 0.7 * inches / bins))
        style = {"fontsize": points, "parse_math": False}
        if which == "x" and max(map(len, names)) > 1:
            style["rotation"] = 90
        set_ticks(range(bins), names, **style)
    else:
        steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
        step = next(step for step in steps if bins / step <= 9)
        shown = range(0, bins, step)
        set_ticks(shown, [str(axis.edges[i]) for i in shown], fontsize=7)
    axes.tick_params(length=2, pad=2)


def _literal(text: str, longest: int) -> str:
    """Returns text as it can be drawn."""
    return labels.drawable(labels.one_line(text), drawing.fonts()[1], longest)
