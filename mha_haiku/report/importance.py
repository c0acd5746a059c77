"""Pictures of how much heads matter and of what pruning them costs, from numbers alone.

L layers, H heads. `mean` and `error` are `[L, H]`, NaN where a layer has fewer heads.
"""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """What pruned models are worth, a point per model.

    Attributes:
      kept: How many heads each has left.
      metric: The metric of each.
      metric_name: What the metric is.
      speed_up: How many times faster than the whole model each was, measured.
      ideal: The same by operation counts.
    """

    kept: Sequence[int]
    metric: Sequence[float]
    metric_name: str
    speed_up: Sequence[float]
    ideal: Sequence[float]


_DOTS_PER_INCH = 120
_MOST_NAMES = 40  # heads, up to which each has its name below its bar


_UNITS = {
    "ablation": "change of the metric when the head is closed",
    "gradient": "slope of the loss, nats",
    "attribution": "share of what closing all costs, nats",
    "confidence": "largest weight of a query",
}

Measures = Mapping[str, tuple[np.ndarray, np.ndarray]]


def heat_maps(
    measures: Measures, *, title: str, head_names: Sequence[Sequence[int]]
) -> bytes:
    """Returns a PNG: a row per measure, heads by layer and beside it heads in order.

    Args:
      measures: By its name, the mean and the standard error of each measure.
      title: Of which run, and over what.
      head_names: For each layer the names of its heads.
    """
    from matplotlib import figure

    rows = len(measures)
    num_layers, num_heads = next(iter(measures.values()))[0].shape
    widths = (max(2.0, 0.35 * num_heads), max(4.0, 0.16 * num_layers * num_heads))
    sheet = figure.Figure(
        (sum(widths) + 2.4, 0.8 + rows * max(2.2, 0.3 * num_layers + 1)),
        dpi=_DOTS_PER_INCH,
        facecolor="white",
        layout="constrained",
    )
    sheet.suptitle(
        f"{title}\nBars: mean and standard error, the most important head first. Grey: "
        "there is no such head.",
        fontsize=9,
        ha="left",
        x=0.01,
        parse_math=False,
    )
    grid = sheet.subplots(
        rows, 2, squeeze=False, gridspec_kw={"width_ratios": list(widths)}
    )
    for (cells, bars), (name, (mean, error)) in zip(
        grid, measures.items(), strict=True
    ):
        cells.set_facecolor("0.9")
        shown = cells.imshow(np.ma.masked_invalid(mean), cmap="viridis", aspect="auto")
        sheet.colorbar(shown, ax=cells).ax.tick_params(labelsize=7)
        cells.set_title(name, fontsize=9, loc="left")
        bars.set_title(_UNITS.get(name, ""), fontsize=8, loc="left")
        cells.set_xlabel("heads by their names", fontsize=8)
        cells.set_ylabel("layer", fontsize=8)
        cells.set_xticks([])
        cells.set_yticks(range(num_layers))
        cells.tick_params(labelsize=7)
        for i, names in enumerate(head_names):
            for place, head in enumerate(names):
                where = {"ha": "center", "va": "center", "color": "0.7"}
                cells.text(place, i, str(head), fontsize=7, **where)
        _bars(bars, mean, error, head_names)
    return _png(sheet)


def curves(curve: Curve, *, title: str) -> bytes:
    """Returns a PNG of the metric, and of speed, against how many heads are kept.

    Args:
      curve: A point per pruned model.
      title: Of which run.
    """
    from matplotlib import figure

    sheet = figure.Figure(
        (8.5, 3.6), dpi=_DOTS_PER_INCH, facecolor="white", layout="constrained"
    )
    sheet.suptitle(title, fontsize=9, parse_math=False)
    left, right = sheet.subplots(1, 2)
    left.plot(curve.kept, curve.metric, marker="o", color="tab:blue")
    left.set_ylabel(curve.metric_name, fontsize=8)
    right.plot(curve.kept, curve.speed_up, marker="o", label="measured")
    right.plot(curve.kept, curve.ideal, ls="--", color="0.5", label="by operations")
    right.set_ylabel("times faster than the whole model", fontsize=8)
    right.legend(fontsize=7)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("heads kept", fontsize=8)
        axes.invert_xaxis()
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    return _png(sheet)


def _bars(axes, mean: np.ndarray, error: np.ndarray, head_names) -> None:
    there = np.argwhere(~np.isnan(mean))
    order = there[np.argsort(-mean[tuple(there.T)], kind="stable")]
    places = tuple(order.T)
    spread = np.nan_to_num(error[places])
    axes.bar(range(len(order)), mean[places], yerr=spread, color="tab:blue", capsize=2)
    axes.axhline(0, color="0.5", lw=0.5)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("layer.head", fontsize=8)
    if len(order) <= _MOST_NAMES:
        names = [f"{i}.{head_names[i][place]}" for i, place in order.tolist()]
        axes.set_xticks(range(len(order)), names, fontsize=6, rotation=90)
    else:
        axes.set_xticks([])


def _png(sheet: "Figure") -> bytes:
    drawn = io.BytesIO()
    # Without the version of matplotlib, the same numbers give the same file.
    sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()
