"""A circuit as a figure: nodes from the embedding up to the logits, and edges."""

import base64
from typing import TYPE_CHECKING

import numpy as np

from mha_haiku.lab import heads
from mha_haiku.lab.heads import graph
from mha_haiku.showing import drawing, markup, plotting, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"q": "C0", "k": "C1", "v": "C2", "feed_forward": "C7", "logits": "C3"}
_THICKEST = 4.0  # points of the strongest edge


@plotting.figure_of.register(heads.Circuit)
def _figure(what: heads.Circuit, *, title: str | None) -> "Figure":
    from matplotlib.lines import Line2D

    places, edges = _places(what), what.edges
    across, up = np.max(list(places.values()), axis=0)
    width = max(4.5, 1.2 * across + 2)
    sheet = drawing.sheet(width, 0.9 * up + 2, title=title or headline(what))
    axes = sheet.subplots()
    axes.set_axis_off()
    strengths = edges.strength / max(edges.strength[what.kept].max(initial=0), 1e-30)
    for i in np.flatnonzero(what.kept):
        ends = (places[tuple(x[i])] for x in (edges.receivers, edges.senders))
        axes.annotate(
            "",
            *ends,
            arrowprops={
                "arrowstyle": "-",
                "color": _COLOURS[str(edges.kinds[i])],
                "linewidth": max(0.5, _THICKEST * strengths[i]),
                "connectionstyle": f"arc3,rad={_BENDS[str(edges.kinds[i])]}",
            },
        )
    for node, place in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
        style = {"ha": "center", "va": "center", "fontsize": 8, "color": "black"}
        axes.text(*place, graph.label(node), bbox=box, parse_math=False, **style)
    axes.set_xlim(-1, across + 1)
    axes.set_ylim(-0.6, up + 0.6)
    kinds = [kind for kind in _COLOURS if kind in edges.kinds[what.kept]]
    lines = [Line2D([], [], color=_COLOURS[kind]) for kind in kinds]
    names = [kind.replace("_", "-") for kind in kinds]
    axes.legend(lines, names, loc="upper right", fontsize=7, title="read as")
    return sheet


# Edges between the same two nodes are drawn side by side.
_BENDS = {"q": -0.12, "k": 0.0, "v": 0.12, "feed_forward": 0.0, "logits": 0.0}


def _places(circuit) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns where the nodes are drawn: above all that they read."""
    ends = [
        x[circuit.kept].tolist()
        for x in (circuit.edges.senders, circuit.edges.receivers)
    ]
    heights: dict[tuple[int, int], int] = {}
    for sender, receiver in zip(*ends, strict=True):  # in the order of the model
        below = heights.setdefault(tuple(sender), 0) + 1
        heights[tuple(receiver)] = max(heights.get(tuple(receiver), 0), below)
    rows: dict[int, list] = {}
    for node, height in sorted(heights.items()):
        rows.setdefault(height, []).append(node)
    widest = max(map(len, rows.values()), default=1)
    return {
        node: ((i + 0.5) * widest / len(row) - 0.5, float(height))
        for height, row in rows.items()
        for i, node in enumerate(row)
    } or {graph.LOGITS: (0.0, 0.0)}


def headline(circuit: heads.Circuit) -> str:
    """Returns how many edges a circuit has, and how faithful they are."""
    return (
        f"{circuit.kept.sum():,} of {len(circuit.kept):,} edges: "
        f"{circuit.faithfulness:.0%} of the metric remains with these alone, "
        f"{circuit.rest:.0%} without them"
    )


picture = drawing.picture(_figure)
"""From a circuit to the bytes of a file; see `drawing.picture`."""


@shown.fragment.register(heads.Circuit)
def _(what: heads.Circuit) -> markup.Html:
    rows = [
        [row["sender"], row["receiver"], row["kind"], f"{row['value']:.3g}"]
        for row in what.rows()
    ]
    names = ("sender", "receiver", "read as", what.edges.unit)
    parts = [markup.plain_table(rows, columns=names)]
    if drawing.is_possible():
        image = picture(what, title=" ")
        source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        image = f'<img alt="The graph" style="max-width:100%" src="{source}">'
        parts.insert(0, markup.Html(image))
    note = f"Edges by {what.measure}, the strongest first."
    return markup.block(headline(what), *parts, note=note)
