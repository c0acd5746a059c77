"""Why heads look there, on the road from cells to the page."""

import dataclasses

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import records
from mha_haiku.lab import heads
from mha_haiku.lab import maps as all_maps
from mha_haiku.records import map_set
from mha_haiku.showing import byte_budget, page

T = 3


def cells(*, key):
    """Pairs of two layers, the second of which has no heads."""
    keys = np.full((2, T), key)
    scores = np.arange(2.0 * T).reshape(2, T)
    scores[0, 0] = -np.inf  # the first query does not see its key
    pairs = np.zeros((2, T, 1, 2), int) + [0, 1]
    components = tuple(map(heads.why.Component, ("token", "biases")))
    zeros = np.zeros((2, T))
    arrays = ({0: x} for x in (keys, scores, zeros, zeros, pairs))
    return heads.why.Cells(components, np.arange(T), *arrays, {0: scores[..., None]})


def test_chosen_heads_keep_their_terms_and_their_maps():
    one = with_why().of_heads(["1"])
    assert [layer.heads for layer in one.layers] == [("1",)]
    (example,) = one.examples
    assert example.weights[0].shape == (1, T, T)
    assert example.why.cells.tolist() == [
        [0, 0, t, k] for k in (0, 1) for t in range(T)
    ]
    assert example.why.scores.tolist() == [3, 4, 5] * 2


def maps():
    axis = map_set.Axis.whole("abc")
    weights = np.tril(np.ones((2, T, T))) / np.arange(1, T + 1)[:, None]
    example = map_set.Example("example 0", axis, axis, (weights,))
    layers = (records.Layer("layer 0", ("0", "1")),)
    return map_set.MapSet("maps", layers, (example,))


def with_why():
    return all_maps.with_why(maps(), [cells(key=0), cells(key=1)])


def test_cells_that_are_seen_reach_the_page():
    shown = page.contents(map_set.Dossier("Why", (with_why(),)))
    why = shown["sets"][0]["examples"][0]["why"]
    assert why["components"] == ["token", "biases"]
    wanted = [[0, h, t, key] for key in (0, 1) for h in range(2) for t in range(T)]
    assert why["cells"] == [each for each in wanted if each[1:3] != [0, 0]]
    assert why["pairs"] == [[[0, 1]]] * 10
    assert why["scores"] == why["terms"] == [[x] for x in (1, 2, 3, 4, 5) * 2]


def test_a_set_with_why_is_saved_and_loaded(tmp_path):
    whole = with_why()
    loaded = map_set.MapSet.load(whole.save(tmp_path / "maps.npz"))
    own, other = (each.examples[0].why for each in (whole, loaded))
    assert own.components == other.components
    for first, second in zip(own[1:], other[1:], strict=True):
        np.testing.assert_array_equal(first, second)


def test_why_goes_where_room_is_short():
    whole = with_why()
    shown = map_set.Dossier("Why", (whole,))
    first, second, *_ = byte_budget.cuts(shown, 0)
    assert first.sets[0].examples[0].why.scores.tolist() == [1, 2, 3, 4, 5] * 2
    assert second.sets[0].examples[0].why is None


@pytest.fixture
def terms():
    parts = np.array([[2.0, 0.0], [0.0, 3.0]]), np.array([[1.0, 1.0], [0.0, -1.0]])
    labels = (("token", "layer 0, head 1"), ("token", "$x$"))
    total = (parts[0] @ parts[1].T).sum() + 0.5
    return heads.why.Pairs(
        (1, 0, 4, 2), "Layer 1", labels, parts[0] @ parts[1].T, total, parts, 0.5, 0.9
    )


def test_terms_are_listed_the_largest_first_with_positions(terms):
    assert [tuple(row.values()) for row in terms.rows()] == [
        (3.0, "layer 0, head 1", "token"),
        (-3.0, "layer 0, head 1", "$x$"),
        (2.0, "token", "token"),
        (0.5, "position", "of the score"),
    ]
    assert sum(row["term"] for row in terms.rows()) == terms.total
    html = mh.show(terms).html
    assert "Held: the factors of norms" in html and "$x$" in html
    assert len(terms.rows(2)) == 2 and repr(terms).count("\n") == 5


def test_a_figure_has_a_bar_for_each_term(terms):
    pytest.importorskip("matplotlib")
    (axes,) = mh.plot(terms).axes
    assert [bar.get_width() for bar in axes.patches] == [3, -3, 2, 0.5]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[1] == "layer 0, head 1  x  $x$"
    assert dataclasses.is_dataclass(terms)
