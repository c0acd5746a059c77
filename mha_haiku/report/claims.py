"""The picture of a claim: its criteria in both arms, and its curves.

n seeds, P points of a curve.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mha_haiku.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_FEW_POINTS = 8  # of a curve, of which each has its tick
_COLOURS = {"claim": "C0", "control": "0.5"}


class Panel(NamedTuple):
    """A number that decides, of each seed.

    Attributes:
      name: What it is.
      unit: Its unit, or "".
      values: By arm ("claim", "control"), those of the seeds `[n]`.
      intervals: By arm, the ends of the interval of the mean.
      words: By arm, "holds", "fails", "undecided" or "void".
      bound: Where the right side begins.
      above: Whether the right side is above the bound.
      published: The number in the paper; None: there is none.
    """

    name: str
    unit: str
    values: Mapping[str, np.ndarray]
    intervals: Mapping[str, tuple[float, float]]
    words: Mapping[str, str]
    bound: float
    above: bool
    published: float | None = None


class Lines(NamedTuple):
    """Numbers along an axis.

    Attributes:
      title: What is seen.
      across: The label of the horizontal axis.
      up: That of the vertical axis.
      points: `[P]`, the places on the horizontal axis.
      values: By the name of the line and by arm, `[n, P]`.
      logarithmic: Whether the horizontal axis is.
      level: A number to draw a dotted line at; None: none.
      level_name: What that is.
    """

    title: str
    across: str
    up: str
    points: np.ndarray
    values: Mapping[str, Mapping[str, np.ndarray]]
    logarithmic: bool = False
    level: float | None = None
    level_name: str = ""


@drawing.picture
def claim(
    panels: Sequence[Panel],
    curves: Sequence[Lines],
    *,
    title: str,
    verdicts: Mapping[str, str],
    control: str,
) -> "Figure":
    """Returns a PNG: first the curves, then a panel per criterion with both arms.

    Args:
      panels: The criteria.
      curves: The lines beside them.
      title: The sentence of the claim.
      verdicts: By arm, "reproduced", "partly", "not" or "open".
      control: What the control is.
    """
    count = len(panels) + len(curves)
    columns = 2 if count == 4 else min(_COLUMNS, count)
    rows = -(-count // columns)
    said = ", ".join(f"{arm}: {word}" for arm, word in verdicts.items())
    control = f"Control: {control}. " if "control" in verdicts else ""
    note = (
        f"{said}. {control}Dots are seeds, bars 90 % intervals of their mean; "
        "all of a bar must lie on the shaded side."
    )
    width = 4.2 * columns
    sheet = drawing.sheet(width, 1.0 + 3.1 * rows, title=title, note=note)
    grid = sheet.subplots(rows, columns, squeeze=False)
    cells = list(grid.flat)
    for axes, lines in zip(cells, curves, strict=False):
        _curves(axes, lines)
    for axes, panel in zip(cells[len(curves) :], panels, strict=False):
        _panel(axes, panel)
    for axes in cells[count:]:
        axes.set_axis_off()
    return sheet


def _panel(axes: "Axes", panel: Panel) -> None:
    arms = list(panel.values)
    finite = [panel.bound]
    for i, arm in enumerate(arms):
        values = np.asarray(panel.values[arm], float)
        finite += values[np.isfinite(values)].tolist()
        colour = _COLOURS[arm]
        spread = i + 0.12 * (np.arange(len(values)) - (len(values) - 1) / 2)
        axes.plot(spread, values, ".", color=colour, markersize=8)
        low, high = panel.intervals[arm]
        if np.isfinite([low, high]).all():
            finite += [low, high]
            middle = (low + high) / 2
            bar = {"fmt": "_", "color": colour, "capsize": 5, "markersize": 16}
            axes.errorbar(i - 0.3, middle, [[middle - low], [high - middle]], **bar)
    if panel.published is not None:
        finite.append(panel.published)
        axes.axhline(panel.published, color="C3", ls="--", lw=1.2, label="published")
    low, high = min(finite), max(finite)
    room = 0.12 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - room, high + room)
    ends = (panel.bound, high + room) if panel.above else (low - room, panel.bound)
    wanted = f"wanted: {'at least' if panel.above else 'at most'} {panel.bound:g}"
    axes.axhspan(*ends, color="C2", alpha=0.13, lw=0, label=wanted)
    axes.set_xlim(-0.6, len(arms) + 0.9)  # room for the legend, which hides no dot so
    labels = [f"{arm}:\n{panel.words[arm]}" for arm in arms]
    axes.set_xticks(range(len(arms)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    _titles(axes, panel.name, "", panel.unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, loc="center right")


def _curves(axes: "Axes", lines: Lines) -> None:
    for i, (name, arms) in enumerate(lines.values.items()):
        for arm, values in arms.items():
            label = name if arm == "claim" else f"{name}, control"
            style = {"color": f"C{i}", "ls": "-" if arm == "claim" else ":"}
            axes.plot(lines.points, values.mean(0), marker=".", label=label, **style)
            band = values.min(0), values.max(0)
            axes.fill_between(lines.points, *band, color=f"C{i}", alpha=0.15, lw=0)
    if lines.level is not None:
        axes.axhline(lines.level, color="0.4", ls=":", lw=1, label=lines.level_name)
    if lines.logarithmic:
        axes.set_xscale("log", base=2)
    if lines.logarithmic or len(lines.points) <= _FEW_POINTS:
        axes.set_xticks(lines.points, [f"{each:g}" for each in lines.points])
        axes.minorticks_off()
    axes.tick_params(labelsize=7)
    _titles(axes, lines.title, lines.across, lines.up)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.6)


def _titles(axes: "Axes", title: str, across: str, up: str) -> None:
    text = textwrap.fill(title, 48)
    axes.set_title(text, fontsize=8.5, loc="left", parse_math=False)
    axes.set_xlabel(across, fontsize=8, parse_math=False)
    axes.set_ylabel(up, fontsize=8, parse_math=False)
