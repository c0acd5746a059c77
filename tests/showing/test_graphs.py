"""A circuit is drawn with its nodes, each above all that it reads."""

import dataclasses

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads
from mha_haiku.lab.heads import graph

ENDS = [
    (graph.EMBEDDING, (0, 1), "q"),
    (graph.EMBEDDING, (0, 1), "v"),
    (graph.EMBEDDING, (1, graph.UNITS), "feed_forward"),
    ((0, 1), (1, graph.UNITS), "feed_forward"),
    ((0, 0), graph.LOGITS, "logits"),
    ((1, graph.UNITS), graph.LOGITS, "logits"),
]


@pytest.fixture
def circuit():
    senders, receivers, kinds = map(np.array, zip(*ENDS, strict=True))
    values = np.array([[3.0, 1, -2, 4, 9, 5]])
    base, other = np.zeros(1), np.full(1, 8.0)
    edges = heads.Edges(values, base, other, senders, receivers, kinds)
    kept = np.array([1, 1, 1, 1, 0, 1], bool)
    return heads.Circuit(edges, kept, np.full(1, 2.0), np.full(1, 6.0), "a measure")


def test_faithfulness_is_what_remains_of_the_change(circuit):
    assert circuit.faithfulness == 0.75 and circuit.rest == 0.25
    assert [row["value"] for row in circuit.rows()] == [5, 4, 3, -2, 1]
    assert repr(circuit) == (
        "Circuit(5 of 6 edges by a measure: faithfulness 0.750, 0.250 without them)"
    )


def test_nodes_stand_above_what_they_read(circuit):
    pytest.importorskip("matplotlib")
    axes = mh.plot(circuit).axes[0]
    heights = {
        text.get_text(): text.get_position()[1]
        for text in axes.texts
        if text.get_text()
    }
    names = ["embedding", "0.1", "feed-forward 1", "logits"]
    assert [heights[name] for name in names] == [0, 1, 2, 3]
    arrows = [text for text in axes.texts if not text.get_text()]
    assert len(arrows) == 5 and len(heights) == 4
    widths = [arrow.arrow_patch.get_linewidth() for arrow in arrows]
    assert np.argmax(widths) == 4 and len(set(widths)) == 5
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    dashed = "dashed: lowers the metric"
    assert labels == ["q", "v", "feed-forward", "logits", dashed]
    styles = [arrow.arrow_patch.get_linestyle() for arrow in arrows]
    assert styles == ["-", "-", "--", "-", "-"]


def test_a_notebook_and_a_page_have_the_edges_and_the_graph(circuit):
    pytest.importorskip("matplotlib")
    html = mh.show(circuit).html
    assert html.count("<img") == 1 and "75% of the metric remains" in html
    assert html.count("feed-forward 1") == 3 and "<script" not in html
    assert "feed-forward 1" in mh.show(circuit.edges).html


def test_an_empty_circuit_is_drawn(circuit):
    pytest.importorskip("matplotlib")
    none = heads.Circuit(
        circuit.edges, np.zeros(6, bool), circuit.only, circuit.without, "a measure"
    )
    assert "0 of 6 edges" in mh.plot(none).get_suptitle()


def test_no_edge_runs_behind_a_node(circuit):
    Path = pytest.importorskip("matplotlib.path").Path
    ends = [
        (graph.EMBEDDING, (0, 0), "v"),
        ((0, 0), (0, graph.UNITS), "feed_forward"),
        ((0, 0), graph.LOGITS, "logits"),
        ((0, graph.UNITS), graph.LOGITS, "logits"),
    ]
    senders, receivers, kinds = map(np.array, zip(*ends, strict=True))
    values, (base, other) = np.array([[4.0, 1, 3, 1]]), (np.zeros(1), np.full(1, 8.0))
    edges = heads.Edges(values, base, other, senders, receivers, kinds)
    column = dataclasses.replace(circuit, edges=edges, kept=np.ones(4, bool))
    for what in (column, edges):
        figure = mh.plot(what)
        axes = figure.axes[0]
        figure.draw_without_rendering()
        boxes = {
            text.get_text(): text.get_bbox_patch().get_window_extent()
            for text in axes.texts
            if text.get_text()
        }
        arrows = [text.arrow_patch for text in axes.texts if not text.get_text()]
        for (*names, _), arrow in zip(ends, arrows, strict=True):
            path = arrow.get_transform().transform_path(arrow.get_path())
            (line,) = path.to_polygons(closed_only=False)
            for name, box in boxes.items():
                if name not in map(graph.label, names):
                    assert not Path(line).intersects_bbox(box, filled=False)
