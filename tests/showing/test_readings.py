"""Notebook displays of objects that are not maps: tables, escaped, and small."""

import html.parser
import io

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.lab import text_maps
from mha_haiku.showing import markup

from .small_maps import H


class Cells(html.parser.HTMLParser):
    """Reads the tables: the text and the attributes of each cell."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append([tag, dict(attributes), ""])

        self.inside = tag in ("td", "th")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.cells[-1][2] += data

    def texts(self, tag):
        return [text for kind, _, text in self.cells if kind == tag]


@pytest.mark.slow
def test_statistics_are_a_row_each(attention_map):
    statistics = attention_map.statistics()
    cells = Cells(statistics._repr_html_())
    names = [name for name in mh.attention.STATISTICS if name in statistics.values]
    rows = cells.texts("th")[1 + H :]
    assert [row.split(",")[0] for row in rows] == names
    entropy = np.asarray(statistics.entropy).mean(0)
    assert cells.texts("td")[:H] == [f"{x:.2f}" for x in entropy]
    assert "nats" in rows[0]
    assert not {"script", "style", "iframe"} & set(cells.tags)


def test_importance_has_its_errors_and_no_cell_where_there_is_no_head():
    per_example = np.stack([np.arange(6.0).reshape(2, 3)] * 4)
    per_example[0] += 1
    per_example[:, 1, 2] = np.nan
    cells = Cells(mh.heads.Heads.of_examples(per_example)._repr_html_())
    assert cells.texts("td") == [f"{x + 0.25:.2f} ± 0.25" for x in range(5)] + [""]
    assert cells.texts("th")[0] == "head"
    many = mh.heads.Heads.of_examples(np.stack([np.zeros((32, 32)), np.ones((32, 32))]))
    assert len(many._repr_html_()) < 200_000
    cells = Cells(many._repr_html_())
    assert set(cells.texts("td")) == {""} and cells.texts("th")[0] == "head"
    titles = {given.get("title") for kind, given, _ in cells.cells if kind == "td"}
    assert titles == {"0.50 ± 0.50"}


def test_a_mask_is_drawn_with_its_expression():
    mask = mh.masks.causal() & mh.masks.padding([3, 7])
    text = mask._repr_html_()
    assert "causal() &amp; padding([3, 7])" in text
    assert "data:image/png;base64," in text
    assert len(text) < 5_000
    shown = []
    jax.jit(lambda x: shown.append((mask & x)._repr_html_()))(mh.masks.padding([1, 2]))
    assert "padding(int32[2])" in shown[0] or "padding(int64[2])" in shown[0]
    assert "<img" not in shown[0]


def test_text_cannot_leave_its_element():
    text = "<img src=x onerror=alert(1)>'\"&‮"
    made = markup.tag("div", text, title=text)
    assert made.count("<") == 2
    assert "‮" not in made[made.index(">") :]
    assert markup.tag("b", markup.tag("i", "x")) == "<b><i>x</i></b>"


def test_a_png_file_is_read_by_others():
    reading = pytest.importorskip("matplotlib.image")
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    read = reading.imread(io.BytesIO(markup.png(image)))
    np.testing.assert_array_equal(np.round(255 * read[..., :3]), image)


def test_negative_weights_are_blue_and_positive_ones_red():
    maps = np.array([[[0.0, 0.5], [np.nan, -1.0]]])
    image = markup.thumbnails(maps, columns=1, side=2).astype(int)
    red, green, blue = image[0, 1]
    assert red > green and red > blue
    red, green, blue = image[1, 1]
    assert blue > green > red
    assert np.ptp(image[0, 0]) < 8  # 0 is white, in the middle


@pytest.mark.slow
def test_arrays_of_signed_weights_are_shown_and_drawn():
    pytest.importorskip("matplotlib")
    weights = np.linspace(-0.5, 1, 18, dtype=np.float32).reshape(1, 2, 3, 3)
    view = mh.show(weights)
    assert "rows sum to any amount" in repr(text_maps.text_maps(weights).maps)
    assert "data:image/png" in view._repr_html_()
    for arrays in (weights, np.repeat(weights, 12, -1)):  # on a root scale
        image = mh.plot(arrays).axes[0].images[0]
        low, high = image.norm.vmin, image.norm.vmax
        assert low == -high and high >= 1
        assert image.norm(0.0) == pytest.approx(0.5)


def test_masked_cells_are_gray_and_the_largest_weight_is_yellow():
    maps = np.array([[[0.0, 1.0], [np.nan, 0.25]]])
    image = markup.thumbnails(maps, columns=1, side=2)
    assert image[0, 1].tolist() == [253, 231, 37]
    assert image[1, 0].tolist() == markup.MASKED.tolist()
    assert image[0, 0].tolist() == [68, 1, 84]
