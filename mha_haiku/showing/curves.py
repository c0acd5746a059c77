"""Pictures of numbers along an axis: learning and pruning."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mha_haiku.showing import canvas

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

    sheet = canvas.sheet(9.0, 3.6, title=title)
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
            text = f"baseline: {baseline_name}"
            style = {"color": "C3", "ls": ":", "lw": 1}
            axes.axhline(baseline[name], label=text, **style)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=1.02 if name == "accuracy" else None)
        axes.legend(fontsize=7)
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
    sheet = canvas.sheet(4.2 * len(panels), 3.6, title=title)
    grid = sheet.subplots(1, len(panels))
    for axes, (label, lines) in zip(grid, panels.items(), strict=True):
        for i, (name, values) in enumerate(lines.items()):
            style = {"ls": "--", "color": "0.5"} if i else {"marker": "o"}
            if name in canvas.KINDS:
                style = {"marker": ".", "color": canvas.KINDS[name]}
            axes.plot(kept, values, label=name, **style)
        _axes(axes, "heads kept", label)
        axes.legend(fontsize=7)
        axes.set_ylim(bottom=0)
        axes.invert_xaxis()
    return sheet


def _axes(axes: "Axes", across: str, up: str) -> None:
    from matplotlib import ticker

    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8, parse_math=False)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=7))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
