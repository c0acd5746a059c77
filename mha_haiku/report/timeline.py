"""A picture of heads while they learn: scores of roles and importance over steps.

P points in time, L layers, H heads.
"""

import io
from collections.abc import Mapping

import numpy as np

_PANELS = {
    "previous_token": "mass on the previous token",
    "next_token": "mass on the next token",
    "same_token": "mass on the own position",
    "first_token": "mass on the first token",
    "induction": "induction: mass on what followed\nthe token before",
    "positional": "queries with their largest weight\nat one offset",
    "uniform": "entropy, of that of equal weights",
    "gradient": "importance: slope of the loss\nby the head's gate, nats",
}
_DOTS_PER_INCH = 120


def picture(
    steps: np.ndarray, scores: Mapping[str, np.ndarray], *, title: str
) -> bytes:
    """Returns a PNG: a panel per score, in it a line per head, coloured by layer.

    Args:
      steps: `[P]`.
      scores: By their names, `[P, L, H]`, NaN where there is no head.
      title: Of which run.
    """
    import matplotlib
    from matplotlib import figure, lines

    names = [name for name in _PANELS if name in scores]
    rows = -(-len(names) // 4)
    sheet = figure.Figure(
        (13, 0.9 + 2.5 * rows),
        dpi=_DOTS_PER_INCH,
        facecolor="white",
        layout="constrained",
    )
    sheet.suptitle(title, fontsize=10, ha="left", x=0.01, parse_math=False)
    grid = sheet.subplots(rows, 4, squeeze=False, sharex=True)
    _, num_layers, num_heads = scores[names[0]].shape
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, num_layers))
    for axes, name in zip(grid.flat, names, strict=False):
        for i in range(num_layers):
            for h in range(num_heads):
                values = scores[name][:, i, h]
                if not np.isnan(values).all():
                    axes.plot(steps, values, color=colours[i], lw=1.2, alpha=0.8)
        axes.set_title(_PANELS[name], fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.set_xlabel("step", fontsize=8)
        if name == "gradient":
            axes.set_ylim(bottom=0)
        else:
            axes.set_ylim(-0.02, 1.02)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    legend = [
        lines.Line2D([], [], color=colour, label=f"layer {i}")
        for i, colour in enumerate(colours)
    ]
    sheet.legend(
        handles=legend, loc="outside upper right", ncols=num_layers, fontsize=8
    )
    drawn = io.BytesIO()
    # Without the version of matplotlib, the same numbers give the same file.
    sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()
