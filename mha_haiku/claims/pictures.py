"""The picture of a claim: its criteria in both arms, and its curves."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mha_haiku.claims import base, verdicts
from mha_haiku.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_FEW_POINTS = 8  # of a curve, of which each has its tick
_COLOURS = {"claim": "C0", "control": "0.5"}


@drawing.picture
def picture(
    claim: base.Claim,
    judged: Mapping[str, verdicts.Verdict],
    measured: Mapping[str, Sequence[base.Numbers]],
) -> "Figure":
    """Returns a PNG: first the curves, then a panel per criterion with both arms."""
    count = len(claim.criteria) + len(claim.curves)
    columns = 2 if count == 4 else min(_COLUMNS, count)
    rows = -(-count // columns)
    said = ", ".join(f"{arm}: {each.word}" for arm, each in judged.items())
    control = f"Control: {claim.control}. " if "control" in judged else ""
    note = (
        f"{said}. {control}Dots are seeds, bars 90 % intervals of their mean; "
        "all of a bar must lie on the shaded side."
    )
    width = 4.2 * columns
    sheet = drawing.sheet(width, 1.0 + 3.1 * rows, title=claim.sentence, note=note)
    grid = sheet.subplots(rows, columns, squeeze=False)
    cells = iter(grid.flat)
    for curve in claim.curves:
        _draw_curve(next(cells), curve, measured)
    for i in range(len(claim.criteria)):
        _draw_criterion(next(cells), {arm: x.judged[i] for arm, x in judged.items()})
    for axes in cells:
        axes.set_axis_off()
    return sheet


def _draw_criterion(axes: "Axes", judged: Mapping[str, verdicts.Judged]) -> None:
    criterion = next(iter(judged.values())).criterion
    finite = [criterion.bound]
    for i, (arm, each) in enumerate(judged.items()):
        values = each.values
        finite += values[np.isfinite(values)].tolist()
        colour = _COLOURS[arm]
        spread = i + 0.12 * (np.arange(len(values)) - (len(values) - 1) / 2)
        axes.plot(spread, values, ".", color=colour, markersize=8)
        _, low, high = each.interval
        if np.isfinite([low, high]).all():
            finite += [low, high]
            middle = (low + high) / 2
            bar = {"fmt": "_", "color": colour, "capsize": 5, "markersize": 16}
            axes.errorbar(i - 0.3, middle, [[middle - low], [high - middle]], **bar)
    if criterion.published is not None:
        finite.append(criterion.published)
        axes.axhline(
            criterion.published, color="C3", ls="--", lw=1.2, label="published"
        )
    low, high = min(finite), max(finite)
    room = 0.12 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - room, high + room)
    is_above = criterion.at_most is None
    ends = (criterion.bound, high + room) if is_above else (low - room, criterion.bound)
    wanted = f"wanted: {'at least' if is_above else 'at most'} {criterion.bound:g}"
    axes.axhspan(*ends, color="C2", alpha=0.13, lw=0, label=wanted)
    axes.set_xlim(-0.6, len(judged) + 0.9)  # room for the legend, which hides no dot so
    labels = [f"{arm}:\n{each.word}" for arm, each in judged.items()]
    axes.set_xticks(range(len(judged)), labels, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    _titles(axes, criterion.name, "", criterion.unit)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, loc="center right")


def _draw_curve(
    axes: "Axes", curve: base.Curve, measured: Mapping[str, Sequence[base.Numbers]]
) -> None:
    points = np.array(curve.points, float)
    for i, (name, template) in enumerate(curve.lines.items()):
        names = [template.format(x) for x in curve.points]
        for arm, by_seed in measured.items():
            values = np.array([[x.get(y, np.nan) for y in names] for x in by_seed])
            label = name if arm == "claim" else f"{name}, control"
            style = {"color": f"C{i}", "ls": "-" if arm == "claim" else ":"}
            axes.plot(points, values.mean(0), marker=".", label=label, **style)
            band = values.min(0), values.max(0)
            axes.fill_between(points, *band, color=f"C{i}", alpha=0.15, lw=0)
    if curve.level is not None:
        axes.axhline(curve.level, color="0.4", ls=":", lw=1, label=curve.level_name)
    if curve.logarithmic:
        axes.set_xscale("log", base=2)
    if curve.logarithmic or len(points) <= _FEW_POINTS:
        axes.set_xticks(points, [f"{each:g}" for each in points])
        axes.minorticks_off()
    axes.tick_params(labelsize=7)
    _titles(axes, curve.title, curve.across, curve.up)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.6)


def _titles(axes: "Axes", title: str, across: str, up: str) -> None:
    text = textwrap.fill(title, 48)
    axes.set_title(text, fontsize=8.5, loc="left", parse_math=False)
    axes.set_xlabel(across, fontsize=8, parse_math=False)
    axes.set_ylabel(up, fontsize=8, parse_math=False)
