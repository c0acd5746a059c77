"""`plot`: figures, by what they hold, and the files that they become."""

import functools
import io
import re

import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.lab import text_maps
from mha_haiku.showing import canvas, curves

from .small_maps import H, make_map
from .test_showing import page_of

matplotlib = pytest.importorskip("matplotlib")


def panels_of(figure):
    """Returns the axes that show maps."""
    return [axes for axes in figure.axes if axes.images and axes.get_title()]


def labels_of(axes, which):
    ticks = axes.get_xticklabels() if which == "x" else axes.get_yticklabels()
    return [tick.get_text() for tick in ticks]


@pytest.mark.slow
def test_a_grid_has_a_panel_for_each_head(attention_map):
    figure = mh.plot(attention_map, tokens="wxyz", key_tokens=list("abcde") + ["$f$"])
    panels = panels_of(figure)
    assert [axes.get_title() for axes in panels] == [f"head {i}" for i in range(H)]
    for i, axes in enumerate(panels):
        weights = np.asarray(attention_map.weights())[0, i]
        np.testing.assert_allclose(axes.images[0].get_array(), weights, atol=1e-6)
    assert labels_of(panels[0], "y") == list("wxyz")
    assert labels_of(panels[-1], "x") == [*"abcde", "$f$"]


@pytest.mark.slow
def test_one_head_of_one_example_with_masked_cells(attention_map):
    figure = mh.plot(attention_map, heads=3, example=1, size=(4, 3))
    (axes,) = panels_of(figure)
    drawn = axes.images[0].get_array()
    assert drawn.mask[:, 3:].all() and not drawn.mask[:, :3].any()
    weights = np.asarray(attention_map.weights())[1, 3, :, :3]
    np.testing.assert_allclose(drawn[:, :3], weights, atol=1e-6)
    assert tuple(figure.get_size_inches()) == (4, 3)


@pytest.mark.slow
def test_layers_are_rows(attention_map):
    other = make_map(4)
    figure = mh.plot([attention_map, other], heads=[2, 0], title="$two$ layers")
    titles = [axes.get_title() for axes in panels_of(figure)]
    assert titles[2:] == ["layer 1, head 2", "layer 1, head 0"]
    grid = panels_of(figure)[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (2, 2)
    assert figure.get_suptitle() == "$two$ layers"
    drawn = panels_of(figure)[2].images[0].get_array()
    np.testing.assert_allclose(drawn, np.asarray(other.weights())[0, 2], atol=1e-6)
    (one,) = panels_of(mh.plot([attention_map, other], layer=1, heads=2))
    np.testing.assert_allclose(one.images[0].get_array(), drawn, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_text_stays_text_in_vector_files(attention_map, kind):
    figure = mh.plot(attention_map, heads=0, tokens=["Wort", "b", "c", "d"])
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    if kind == "svg":
        text = content.getvalue().decode()
        assert re.search(r"<text[^>]*>Wort</text>", text)
        assert "<script" not in text
    else:
        assert b"/Type3" not in content.getvalue()
        assert b"/FontFile2" in content.getvalue()


def test_a_figure_shows_itself(attention_map):
    assert mh.plot(attention_map, heads=0)._repr_png_().startswith(b"\x89PNG")


def test_roles_are_named_in_their_cells():
    names = np.array([["induction", "no_clear_role"]], object)
    role = mh.heads.Column(np.array([[0.8, np.nan]]), "score", "", names=names)
    roles = mh.heads.Heads.of("Roles", {"role": role})
    axes = mh.plot(roles).axes[0]
    assert [text.get_text() for text in axes.texts] == [
        "induction 0.80",
        "no_clear_role",
    ]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.8, 0]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads must be one of 0, 1, 2, 3, 4; got '5'"),
        ({"heads": []}, "heads must be a number or a list of them"),
        ({"layer": 1}, "layer must be an integer from 0 to 0, got 1"),
        ({"example": 2}, "example must be an integer from 0 to 1, got 2"),
        ({"tokens": "abc"}, "tokens must be 4"),
        ({"size": (1,)}, "size must be"),
        ({"size": (1, -1)}, "size must be a finite number above 0"),
    ],
)
def test_what_does_not_fit_is_refused(attention_map, options, message):
    with pytest.raises(ValueError, match=message):
        mh.plot(attention_map, **options)


@pytest.mark.slow
def test_what_has_no_figure_is_refused(attention_map, tmp_path):
    with pytest.raises(TypeError, match="what must be attention maps"):
        mh.plot(3)
    with pytest.raises(ValueError, match="heads= is for attention maps"):
        mh.plot(attention_map.statistics(), heads=1)
    with pytest.raises(ValueError, match="what must be one of metrics.jsonl"):
        mh.plot(tmp_path / "loss.txt")


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_numbers_give_the_same_file(kind):
    curve = [2, 1], {"this order": [0.9, 0.5]}, {"measured": [1, 2]}, {}
    draw = functools.partial(curves.pruning, *curve, metric_name="a", title="t")
    first, second = (canvas.content(draw, kind) for _ in range(2))
    assert first == second
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert first.startswith(start)


@pytest.mark.slow
def test_a_layer_of_maps_keeps_its_name_and_its_tokens(attention_map):
    maps = text_maps.TextMaps([attention_map] * 2, "wxyz", list("abcdef"))
    (axes, *_) = (figure := mh.plot(maps[1], heads=[3, 1])).axes
    assert (figure.get_suptitle(), axes.get_title()) == ("layer 1", "head 3")
    assert labels_of(axes, "y") == list("wxyz")
    (layer,) = page_of(mh.show(maps[-1]))["sets"][0]["layers"]
    assert layer["name"] == "layer 1"
