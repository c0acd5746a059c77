"""Pictures of numbers along an axis: learning, heads in time, and pruning.

P points, L layers, H heads.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku.records import Column
from mha_haiku.showing import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def learning(
    reports: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baseline: Mapping[str, float] | None = None,
    baseline_name: str = "",
) -> "Figure":
    """Draws loss and accuracy over the steps of a training.

    `reports` are the lines of metrics.jsonl, and `baseline` has "loss" and "accuracy"
    of the best answer without the input, or of another simple baseline.
    """
    units = {"loss": "loss, nats per target", "accuracy": "accuracy"}

    sheet = drawing.sheet(9.0, 3.6, title=title)
    for axes, (name, label) in zip(sheet.subplots(1, 2), units.items(), strict=True):
        _axes(axes, "training step", label)
        for key, text, style in (
            (name, "training, mean since the last report", {"color": "0.6"}),
            (f"held_out_{name}", "held-out", {"color": "C0", "marker": "."}),
        ):
            points = [(line["step"], line[key]) for line in reports if key in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=text, **style)
        if baseline and name in baseline:
            meaning = "the best without looking at the input"
            if baseline_name == "bag of words":
                meaning = "naive Bayes, without the order of words"
            text = f"{baseline_name}: {meaning}"
            style = {"color": "C3", "ls": ":", "lw": 1}
            axes.axhline(baseline[name], label=text, **style)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=1.02 if name == "accuracy" else None)
        axes.legend(fontsize=7)
    return sheet


def timeline(
    steps: np.ndarray,
    scores: Mapping[str, Column],
    *,
    title: str,
    labels: Sequence[str] = (),
) -> "Figure":
    """Draws a panel per score with a line per head, colored by layer.

    Steps are `[P]`, and the mean of each score `[P, L, H]`, NaN where there is no head;
    a score without a unit is a share, from 0 to 1. If heads are of several kinds,
    labels name each layer, as "cross 0", and kinds have different colors.
    """
    from matplotlib import lines

    rows = -(-len(scores) // 4)
    _, num_layers, num_heads = next(iter(scores.values())).mean.shape
    colors = _layer_colors(num_layers, labels)
    labels = labels or [f"layer {i}" for i in range(num_layers)]

    sheet = drawing.sheet(13, 0.9 + 2.5 * rows, title=title, note="A line per head.")
    grid = sheet.subplots(rows, 4, squeeze=False)
    for axes, score in zip(grid.flat, scores.values(), strict=False):
        for i in range(num_layers):
            for h in range(num_heads):
                values = score.mean[:, i, h]
                if not np.isnan(values).all():
                    axes.plot(steps, values, color=colors[i], lw=1.2, alpha=0.8)
        _axes(axes, "training step", score.unit)
        label = textwrap.fill(score.label, 48)
        axes.set_title(label, fontsize=8, loc="left", parse_math=False)
        if score.unit:
            axes.set_ylim(bottom=min(0.0, np.nanmin(score.mean)))
        else:
            axes.set_ylim(-0.02, 1.02)
    for axes in list(grid.flat)[len(scores) :]:
        axes.set_axis_off()
    legend = [
        lines.Line2D([], [], color=color, label=label)
        for label, color in zip(labels, colors, strict=True)
    ]
    sheet.legend(
        handles=legend,
        loc="outside upper right",
        ncols=min(num_layers, 8),
        fontsize=8,
    )
    return sheet


def pruning(
    kept: Sequence[int],
    metrics: Mapping[str, Sequence[float]],
    speed_ups: Mapping[str, Sequence[float]],
    kinds: Mapping[str, Sequence[int]],
    *,
    metric_name: str,
    title: str,
) -> "Figure":
    """Draws metrics and speed of pruned models against the number of heads kept.

    Metrics and speed-ups are by their names in the legend; those after the first are
    for comparison. If heads are of several kinds, a third panel has the number of heads
    of each kind.
    """
    panels = {
        metric_name: metrics,
        "heads kept of the kind": kinds,
        "forward pass, times faster than the whole model's": speed_ups,
    }
    panels = {label: lines for label, lines in panels.items() if lines}
    sheet = drawing.sheet(4.2 * len(panels), 3.6, title=title)
    grid = sheet.subplots(1, len(panels))
    for axes, (label, lines) in zip(grid, panels.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            style = {"ls": "--", "color": "0.5"} if i else {"marker": "o"}
            if name in drawing.KINDS:
                style = {"marker": ".", "color": drawing.KINDS[name]}
            axes.plot(kept, values, label=name, **style)
        _axes(axes, "heads kept", label)
        axes.legend(fontsize=7)
        axes.set_ylim(bottom=0)
        axes.invert_xaxis()
    return sheet


def _layer_colors(num_layers: int, labels: Sequence[str]) -> list:
    """Chooses a color per layer: lighter for later layers, other shades per kind."""
    import matplotlib

    if not labels:
        return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, num_layers)))
    colors = []
    for kind, group in itertools.groupby(labels, lambda label: label.split()[0]):
        shades = matplotlib.colormaps[drawing.SHADES[kind]]
        colors += list(shades(np.linspace(0.45, 0.95, len(list(group)))))
    return colors


def _axes(axes: "Axes", across: str, up: str) -> None:
    from matplotlib import ticker

    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8, parse_math=False)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=7))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
