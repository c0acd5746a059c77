"""Tables and figures of patching, paths, circuits, and why a head looks there.

L layers, H heads of a layer, T positions.
"""

import base64
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku import records
from mha_haiku.lab import heads
from mha_haiku.lab.heads import graph
from mha_haiku.showing import canvas, markup, plots, readings
from mha_haiku.showing.measurements import Grid, bars, rows_table, shows, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_EDGES = 64
_MOST_ROWS = 20
_COLORS = {"q": "C0", "k": "C1", "v": "C2", "feed_forward": "C7", "logits": "C3"}
# Edges between the same two nodes are drawn side by side, and edges that pass rows of
# nodes in an arc around the nearest one.
_BENDS = {"q": -0.12, "k": 0.0, "v": 0.12, "feed_forward": 0.0, "logits": 0.0}
_ARC = 0.35
_THICKEST = 4.0  # points of the strongest edge


def _of_patched(patched: heads.Patched) -> Grid:
    mean, axes = patched.mean, patched.axes
    named = records.Layer.of_kinds(patched.kinds, [()] * len(mean))
    layers = [f"layer {x}" for x in patched.numbers] or [each.name for each in named]
    rows = layers
    columns = list(map(visible, patched.tokens))
    if axes == ("layer",):
        mean, columns = mean[:, None], [patched.unit]
    elif axes == ("layer", "head"):
        columns = [f"head {i}" for i in range(mean.shape[1])]
    else:
        columns = columns or [str(i) for i in range(mean.shape[-1])]
        if axes != ("layer", "position"):
            num_heads = range(mean.shape[1])
            rows = [f"{layer}, head {head}" for layer in layers for head in num_heads]
            mean = mean.reshape(-1, mean.shape[-1])
    return Grid(
        mean,
        rows,
        columns,
        patched.unit,
        title=f"Activation patching: {_change(patched)}",
        note="Each cell replaces one activation by the other text's; the metric is "
        f"{patched.unit}.",
    )


def _change(result: heads.Patched | heads.Edges) -> str:
    """Says what the numbers of patching are."""
    count = len(result.base)
    pairs = "one pair" if count == 1 else f"the mean of {count} pairs"
    return f"change of the metric, {pairs}"


def _of_edges(edges: heads.Edges) -> Grid:
    senders = list(dict.fromkeys(map(tuple, edges.senders.tolist())))
    pairs = zip(edges.receivers.tolist(), edges.kinds.tolist(), strict=True)
    receivers = [(*receiver, kind) for receiver, kind in pairs]
    columns = sorted(set(receivers), key=lambda each: (each[0] < 0, each))
    values = np.full((len(senders), len(columns)), np.nan)
    for i, receiver in enumerate(receivers):
        row = senders.index(tuple(edges.senders[i].tolist()))
        values[row, columns.index(receiver)] = edges.mean[i]
    return Grid(
        values,
        [*map(graph.label, senders)],
        [f"{graph.label(x)} {kind * (kind in 'qkv')}".strip() for *x, kind in columns],
        edges.unit,
        title=f"Paths: {_change(edges)}",
        note="Columns read by queries (q), keys (k) or values (v); the metric is "
        f"{edges.unit}.",
        axes=("writing head", "reading head"),
    )


@readings.fragment.register
def _(answer: heads.why.Answer) -> markup.Html:
    table = rows_table(answer.rows(_MOST_ROWS), digits=4)
    return markup.block(answer.title, table, note=heads.why.HELD)


@plots.figure_of.register(heads.why.Answer)
def _(what: heads.why.Answer, *, title: str | None) -> "Figure":
    """Draws the largest terms as bars, labeled by their components."""
    rows = what.rows(_MOST_ROWS)
    terms = [row["term"] for row in rows]
    names = [
        "  x  ".join(visible(x) for x in row.values() if isinstance(x, str))
        for row in rows
    ]
    return bars(names, terms, "term", title=title or what.title)


shows(heads.Patched, _of_patched)
shows(heads.Edges, _of_edges)


@plots.figure_of.register(heads.Edges)
def _(what: heads.Edges, *, title: str | None) -> "Figure":
    """Draws a graph of the strongest edges, and next to it all edges as cells."""
    grid = _of_edges(what)
    strongest = np.zeros(len(what.strength), bool)
    strongest[np.argsort(-what.strength)[:_MOST_EDGES]] = True
    places = _places(what, strongest)
    up = max(y for _, y in places.values())
    height = max(3.0, 0.25 * len(grid.rows) + 1.5, 0.7 * up + 2)
    width = 6 + 0.3 * len(grid.columns)
    sheet = canvas.sheet(width, height, title=title or grid.title)
    graph_axes, cells = sheet.subplots(1, 2)
    grid.draw(cells)
    _draw_graph(graph_axes, what, strongest, places)
    return sheet


@plots.figure_of.register(heads.Circuit)
def draw_circuit(what: heads.Circuit, *, title: str | None) -> "Figure":
    """Draws the graph of a circuit; by default the title has its faithfulness."""
    places = _places(what.edges, what.kept)
    across, up = np.max(list(places.values()), axis=0)
    width = max(4.5, 1.2 * across + 2)
    title = title or ": ".join(filter(None, [what.title, headline(what)]))
    sheet = canvas.sheet(width, 0.9 * up + 2, title=title)
    _draw_graph(sheet.subplots(), what.edges, what.kept, places)
    return sheet


def _draw_graph(
    axes: "Axes",
    edges: heads.Edges,
    kept: np.ndarray,
    places: Mapping[graph.Node, Any],
) -> None:
    """Draws the kept edges, the stronger the thicker; dashed: lowers the metric."""
    axes.set_axis_off()
    lowers = kept & (edges.mean < 0)
    strengths = edges.strength / max(edges.strength[kept].max(initial=0), 1e-30)
    for node, (x, y) in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
        style = {"ha": "center", "va": "center", "fontsize": 8, "color": "black"}
        style |= {"bbox": box, "zorder": 4}  # above the edges
        axes.text(x, y, graph.label(node), parse_math=False, **style)
    across, up = np.max(list(places.values()), axis=0)
    axes.set_xlim(-1, across + 1)
    axes.set_ylim(-0.6, up + 0.6)
    for kind in [x for x in _COLORS if x in edges.kinds[kept]]:
        axes.plot([], [], color=_COLORS[kind], label=kind.replace("_", "-"))
    if lowers.any():
        axes.plot([], [], "--", color="0.3", label="dashed: lowers the metric")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 2}
    axes.legend(handles=axes.lines, title="read as", fontsize=7, **below)

    for i in np.flatnonzero(kept):
        ends = [tuple(x[i].tolist()) for x in (edges.receivers, edges.senders)]
        bend = _BENDS[str(edges.kinds[i])]
        rows = places[ends[0]][1] - places[ends[1]][1]
        if rows > 1:
            bend += _ARC * rows / (rows - 1)
        axes.annotate(
            "",
            *(places[x] for x in ends),
            arrowprops={
                "arrowstyle": "-",
                "color": _COLORS[str(edges.kinds[i])],
                "linestyle": "--" if lowers[i] else "-",
                "linewidth": max(0.5, _THICKEST * strengths[i]),
                "connectionstyle": f"arc3,rad={bend}",
            },
        )


def _places(
    edges: heads.Edges, kept: np.ndarray
) -> dict[tuple[int, int], tuple[float, float]]:
    """Places the nodes above all nodes that they read."""
    ends = [x[kept].tolist() for x in (edges.senders, edges.receivers)]
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
    """States the number of edges of a circuit, and its faithfulness."""
    return (
        f"{circuit.kept.sum():,} of {len(circuit.kept):,} edges: "
        f"{circuit.faithfulness:.0%} of the metric remains with these alone, "
        f"{circuit.rest:.0%} without them"
    )


@readings.fragment.register
def _(what: heads.Circuit) -> markup.Html:
    names = {"sender": "writing head", "receiver": "reading head", "kind": "read as"}
    names["value"] = what.edges.unit
    rows = ({names[x]: row[x] for x in names} for row in what.rows())
    parts = [rows_table(rows, digits=3)]
    if canvas.is_possible():
        image = canvas.content(functools.partial(draw_circuit, what, title=" "))
        source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        image = f'<img alt="The graph" style="max-width:100%" src="{source}">'
        parts.insert(0, markup.Html(image))
    note = f"Edges by {what.measure}, the strongest first."
    return markup.block(headline(what), *parts, note=note)
