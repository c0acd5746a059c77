"""Figures of numbers per head: statistics and importance.

L layers, H heads. Each number comes with its name, label and unit, so that any number
can be drawn.
"""

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku.records import Column, Heads, Layer
from mha_haiku.records.heads import Columns
from mha_haiku.showing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4  # of heat maps in a picture
_MOST_NAMES = 200  # of heads below their bars; of more heads every n-th is named


def picture(heads: Heads, *, title: str | None = None) -> "Figure":
    """Draws the columns of a record; the title defaults to the record's title.

    A column that ranks heads has a row with the heads by layer and in order; any other
    column is a heat map.
    """
    title = title or heads.title
    ranked = {name: x for name, x in heads.columns.items() if x.is_ranked}
    if ranked:
        return _in_order(ranked, heads.layers, title)
    return _by_layer(heads.numbers, heads.layers, title)


def _by_layer(numbers: Columns, layers: Sequence[Layer], title: str) -> "Figure":
    num_layers, num_heads = next(iter(numbers.values())).mean.shape
    rows = math.ceil(len(numbers) / _COLUMNS)
    columns = min(_COLUMNS, len(numbers))
    across = max(3.2, min(0.42 * num_heads, 8) + 1.3)
    down = max(1.75, min(0.3 * num_layers, 8) + 1.05)

    sheet = canvas.sheet(
        columns * across,
        0.7 + rows * down,
        title=title,
        note=f"A cell is a head: the mean over its queries.{_gray(numbers, layers)}",
    )
    grid = list(sheet.subplots(rows, columns, squeeze=False).flat)
    for axes, column in zip(grid, numbers.values(), strict=False):
        _draw_cells(axes, column, layers, title=column.label)
    for axes in grid[len(numbers) :]:
        axes.set_axis_off()
    return sheet


def _in_order(numbers: Columns, layers: Sequence[Layer], title: str) -> "Figure":
    """Draws a row per measure: heads by layer, and next to it in order."""
    num_layers, num_heads = next(iter(numbers.values())).mean.shape
    across = (max(2.6, 0.35 * num_heads), max(4.0, 0.16 * num_layers * num_heads))
    has_errors = any(_errors(column) is not None for column in numbers.values())
    heights = "mean and standard error" if has_errors else "mean"

    sheet = canvas.sheet(
        sum(across) + 2.4,
        0.9 + len(numbers) * max(2.2, 0.3 * num_layers + 1),
        title=title,
        note="Left: a cell is a head, with its name. Right: the most important "
        f"head first, {heights}.{_gray(numbers, layers)}",
    )
    grid = sheet.subplots(
        len(numbers), 2, squeeze=False, gridspec_kw={"width_ratios": across}
    )
    for (cells, bars), (name, column) in zip(grid, numbers.items(), strict=True):
        _draw_cells(cells, column, layers, title=name, has_names=True)
        _draw_bars(bars, name, column, layers)
    return sheet


def _draw_cells(
    axes: "Axes",
    numbers: Column,
    layers: Sequence[Layer],
    *,
    title: str,
    has_names: bool = False,
) -> None:
    """Draws a number of each head by layer, or with the names of heads in the cells."""
    names, columns = None, _some(range(numbers.mean.shape[1]))
    if has_names:
        names, columns = np.full(numbers.mean.shape, "", object), []
        for row, layer in zip(names, layers, strict=True):
            row[: len(layer.heads)] = layer.heads
    canvas.heat_map(
        axes,
        numbers.mean,
        canvas.Scale.of(numbers.mean, numbers.unit),
        rows=_some(x.name if x.kind else x.number for x in layers),
        columns=columns,
        unit=numbers.unit,
        texts=names,
    )
    title = textwrap.fill(title, 44)
    axes.set_title(title, fontsize=8.5, loc="left", parse_math=False)
    for i, (layer, after) in enumerate(itertools.pairwise(layers)):
        if layer.kind != after.kind:  # a gap between kinds
            axes.axhline(i + 0.5, color=axes.figure.get_facecolor(), lw=3)
    axes.set_xlabel(
        "head, by its name" if has_names else "head", fontsize=8, labelpad=1
    )
    if not any(layer.kind for layer in layers):
        axes.set_ylabel("layer", fontsize=8, labelpad=2)


def _some(names: Iterable[Any]) -> list[str]:
    """Keeps at most 16 of the names, at equal distances; others are empty."""
    names = list(map(str, names))
    every = max(1, math.ceil(len(names) / 16))
    return [name if i % every == 0 else "" for i, name in enumerate(names)]


def _draw_bars(
    axes: "Axes", name: str, numbers: Column, layers: Sequence[Layer]
) -> None:
    from matplotlib import patches

    cells = np.argwhere(~np.isnan(numbers.mean))
    order = cells[np.argsort(-numbers.mean[tuple(cells.T)], kind="stable")]
    places = tuple(order.T)
    errors = _errors(numbers)
    kinds = list(dict.fromkeys(layer.kind for layer in layers if layer.kind))
    paint = {x: canvas.KINDS.get(x, f"C{i + 3}") for i, x in enumerate(kinds)}
    colors = [paint.get(layers[i].kind, "tab:blue") for i, _ in order.tolist()]
    spread = None if errors is None else errors[places]
    heights = numbers.mean[places]
    axes.bar(range(len(order)), heights, yerr=spread, color=colors, capsize=2)
    if kinds:
        legend = [patches.Patch(color=paint[x], label=x) for x in kinds]
        axes.legend(handles=legend, fontsize=7)
    axes.axhline(0, color="0.5", lw=0.5)
    label = "" if numbers.label == name else numbers.label
    axes.set_title(label, fontsize=8, loc="left", parse_math=False)
    axes.tick_params(labelsize=7)
    axes.set_xlabel(
        "head: kind.layer.head" if kinds else "head: layer.head", fontsize=8
    )
    step = math.ceil(len(order) / _MOST_NAMES) or 1
    some = order[::step].tolist()
    names = [f"{layers[i].address}.{layers[i].heads[h]}" for i, h in some]
    axes.set_xticks(range(0, len(order), step), names, fontsize=6, rotation=90)


def _errors(numbers: Column) -> np.ndarray | None:
    """Returns the standard errors, which fewer than two examples do not have."""
    errors = numbers.standard_error
    return None if errors is None or np.isnan(errors).all() else errors


def _gray(numbers: Columns, layers: Sequence[Layer]) -> str:
    lacks = any(np.isnan(column.mean).any() for column in numbers.values())
    has_kinds = any(layer.kind for layer in layers)
    what = "head, or the number is not of its kind" if has_kinds else "head"
    return f" Gray: there is no such {what}." if lacks else ""
