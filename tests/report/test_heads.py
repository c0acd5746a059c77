"""Numbers per head as text and as a picture."""

import io
import logging

import numpy as np
import pytest

from mha_haiku import report
from mha_haiku.report import heads

NAMES = (
    *("entropy", "perplexity", "squared_weights", "largest_weight"),
    *("distance", "rms_distance", "first_position", "received_gini"),
    *("previous_position", "own_position", "next_position"),
    *("largest_at_previous", "largest_at_own", "largest_at_next"),
)
OF_TOKENS = ("same_token", "induction")


def _means(layers=2, num_heads=3, names=NAMES + OF_TOKENS):
    """Returns a different number below 0.9 in every place."""
    numbers = np.random.default_rng(0).permutation(len(names) * layers * num_heads)
    numbers = 0.9 * numbers.reshape(len(names), layers, num_heads) / numbers.size
    return dict(zip(names, numbers, strict=True))


def _lines(means, **options):
    return heads.table(means, **options).split("\n\n")[0].splitlines()


def test_a_line_per_head_has_the_numbers_below_their_headings():
    means = _means()
    means["perplexity"][1, 2], means["distance"][1, 2] = 12.34, 1234.5
    _, heading, *lines = _lines(means, layers=(0, 4))
    assert (
        heading.split()
        == (
            "layer head entropy keys largest distance -1 0 +1 first induction -1 0 +1"
        ).split()
    )
    assert len(lines) == 6
    found = lines[5].split()
    assert found[:2] == ["4", "2"]
    assert found[3], found[5] == ("12.3", "1234")
    names = ["entropy", "perplexity", "largest_weight", "distance"]
    names += ["previous_position", "own_position", "next_position"]
    names += ["first_position", "induction"]
    names += ["largest_at_previous", "largest_at_own", "largest_at_next"]
    shown = [float(x) for x in found[2:]]
    wanted = [means[name][1, 2] for name in names]
    np.testing.assert_allclose(shown, wanted, rtol=5e-3, atol=0.0051)
    ends = [i for i, c in enumerate(heading + " ") if c == " " and heading[i - 1] > " "]
    for line in lines:
        assert all(line[end - 1] != " " for end in ends)


@pytest.mark.parametrize(
    ("name", "share", "mark"),
    [
        ("largest_at_previous", 0.9, "positional (-1)"),
        ("largest_at_own", 0.95, "positional (0)"),
        ("largest_at_next", 1.0, "positional (+1)"),
        ("largest_at_next", 0.899, None),
    ],
)
def test_a_head_with_most_queries_at_one_offset_is_positional(name, share, mark):
    means = _means()
    means[name][1, 0] = share
    marked = [line for line in _lines(means, layers=(0, 1)) if "positional" in line]
    if mark is None:
        assert not marked
    else:
        (line,) = marked
        assert line.split()[:2] == ["1", "0"]
        assert line.endswith(mark)


def test_heads_that_a_layer_lacks_have_no_line():
    means = _means()
    for values in means.values():
        values[0, 1:] = np.nan
    assert len(_lines(means, layers=(0, 1))) == 2 + 1 + 3


def test_without_tokens_nothing_is_said_about_them():
    text = heads.table(_means(names=NAMES), layers=(0, 1))
    assert "induction" not in text
    assert "induction" in heads.table(_means(), layers=(0, 1))


def test_each_statistic_has_a_panel_with_its_numbers_title_and_unit():
    pytest.importorskip("matplotlib")
    means = _means()
    sheet = heads._figure(means, "$title_", (0, 4))
    panels = [axes for axes in sheet.axes if axes.get_title("left")]
    bars = [axes for axes in sheet.axes if not axes.get_title("left")]
    assert len(panels) == len(bars) == len(means)
    assert all(axes.get_ylabel() for axes in bars)
    shown = [axes.get_images()[0].get_array() for axes in panels]
    for values in means.values():
        assert sum(np.array_equal(values, x) for x in shown) == 1
    for axes in panels:
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
        assert [x.get_text() for x in axes.get_yticklabels()] == ["0", "4"]
        written = [float(text.get_text()) for text in axes.texts]
        values = axes.get_images()[0].get_array().ravel()
        np.testing.assert_allclose(written, values, atol=0.0051)
    assert sheet.texts[0].get_text() == "$title_"


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 5), (12, 12), (40, 2), (2, 40)])
def test_nothing_overlaps(shape):
    pytest.importorskip("matplotlib")
    sheet = heads._figure(_means(*shape), "title", range(shape[0]))
    width, height = sheet.get_size_inches() * sheet.dpi
    assert max(width, height) < 6000
    sheet.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in sheet.axes]
    panels = [axes for axes in sheet.axes if axes.get_title("left")]
    # A title may reach over its own colour bar.
    bodies = [axes.get_window_extent() for axes in panels]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= width and box.y1 <= height
        assert sum(box.overlaps(body) for body in bodies) <= 1
    for axes in panels:
        sizes = [text.get_window_extent() for text in axes.texts]
        across = axes.get_window_extent().width / shape[1]
        assert all(size.width < across for size in sizes)


def test_numbers_are_written_only_where_they_fit():
    pytest.importorskip("matplotlib")
    sheet = heads._figure(_means(2, 9), "title", (0, 1))
    assert not any(axes.texts for axes in sheet.axes)


def test_missing_heads_are_explained():
    pytest.importorskip("matplotlib")
    means = _means()
    said = heads._figure(means, "title", (0, 1)).texts[1].get_text()
    assert "Grey" not in said
    for values in means.values():
        values[0, 2] = np.nan
    said = heads._figure(means, "title", (0, 1)).texts[1].get_text()
    assert "Grey" in said


def test_numbers_that_are_all_zero_can_be_drawn():
    pytest.importorskip("matplotlib")
    zeros = {name: np.zeros((1, 2)) for name in NAMES}
    assert heads.picture(zeros, title="title", layers=(0,))


def test_the_same_numbers_give_the_same_file(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    options = {"title": "title", "layers": (0, 1)}
    path = report.write_heads(tmp_path, _means(), **options)
    assert path == tmp_path / "head_statistics.png"
    picture = path.read_bytes()
    assert picture == heads.picture(_means(), **options)
    assert min(image.open(io.BytesIO(picture)).size) > 500
    assert [x.name for x in tmp_path.iterdir()] == ["head_statistics.png"]


def test_without_matplotlib_a_warning_takes_the_place_of_the_picture(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        found = report.write_heads(tmp_path, _means(), title="title", layers=(0, 1))
    assert found is None
    assert "pip install" in caplog.text
    assert not list(tmp_path.iterdir())
