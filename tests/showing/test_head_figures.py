"""Numbers per head: whatever is handed in is shown, with its unit and what it is."""

import numpy as np
import pytest

from mha_haiku.records import Column, Heads, Layer
from mha_haiku.showing import head_figures

NAMES = ("entropy", "a_new_one", "largest_at_previous", "largest_at_own")
NAMES += ("largest_at_next",)
L, H = 2, 3


def _numbers(layers=L, num_heads=H, names=NAMES):
    """A different number below 0.9 in every place."""
    values = np.random.default_rng(0).permutation(len(names) * layers * num_heads)
    values = 0.9 * values.reshape(len(names), layers, num_heads) / values.size
    return {
        name: Column(mean, f"unit {i}", f"what {name} is", mean / 10)
        for i, (name, mean) in enumerate(zip(names, values, strict=True))
    }


def _layers(numbers, heads=range(H)):
    return [Layer.of_model("", i, i, heads) for i in numbers]


def _heads(numbers, layers=(0, 4), heads=range(H)):
    return Heads("title", tuple(_layers(layers, heads)), numbers)


def _table(numbers):
    return _heads(numbers).table()


def test_a_row_per_head_has_every_number_with_its_unit():
    numbers = _numbers()
    table = _table(numbers)
    rows = [(row["layer"], row["head"]) for row in table.rows]
    assert rows == [(i, h) for i in (0, 4) for h in range(H)]
    for name, each in numbers.items():
        assert table.rows[5][name] == (each.mean[1, 2], each.standard_error[1, 2])
    units = {column.name: column.unit for column in table.columns}
    assert units["a_new_one"] == "unit 1"
    header = table.csv().splitlines()[0].split(",")
    assert header[:4] == ["layer", "head", "entropy", "entropy_standard_error"]
    assert "what a_new_one is, unit 1" in _heads(numbers).text()


def _sheet(numbers, layers=(0, 4), heads=range(H), title="title"):
    return head_figures.picture(_heads(numbers, layers, heads), title=title)


def test_each_number_has_a_panel_with_its_title_and_unit():
    numbers = _numbers()
    sheet = _sheet(numbers, title="$title_")
    panels = [axes for axes in sheet.axes if axes.get_images()]
    assert len(panels) == len(numbers)
    for axes, each in zip(panels, numbers.values(), strict=True):
        assert np.array_equal(axes.get_images()[0].get_array(), each.mean)
        assert axes.get_title("left") == each.label
        assert [x.get_text() for x in axes.get_yticklabels()] == ["0", "4"]
        written = [float(text.get_text()) for text in axes.texts]
        np.testing.assert_allclose(written, each.mean.ravel(), atol=0.0051)
    bars = {axes.get_ylabel() for axes in sheet.axes}
    assert {each.unit for each in numbers.values()} <= bars
    assert sheet.get_suptitle().startswith("$title_\n")
    assert "Gray" not in sheet.get_suptitle()
    numbers["entropy"].mean[0, 0] = np.nan
    assert "Gray" in _sheet(numbers).get_suptitle()


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (12, 12), (40, 2), (2, 40)])
def test_nothing_leaves_the_sheet_or_lies_on_another_panel(shape):
    sheet = _sheet(_numbers(*shape), layers=range(shape[0]), heads=range(shape[1]))
    width, height = sheet.get_size_inches() * sheet.dpi
    assert max(width, height) < 6000
    sheet.canvas.draw()
    panels = [axes for axes in sheet.axes if axes.get_images()]
    bodies = [axes.get_window_extent() for axes in panels]
    for axes in panels:
        box = axes.get_tightbbox()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= width and box.y1 <= height
        assert sum(box.overlaps(body) for body in bodies) <= 1
        across = axes.get_window_extent().width / shape[1]
        assert all(text.get_window_extent().width < across for text in axes.texts)


def test_importance_has_heads_by_layer_and_in_order():
    ranks = np.ones((L, H, 2))
    numbers = {"ablation": _numbers()["entropy"]._replace(ranks=ranks)}
    names = [[0, 1, 5], [2, 3, 4]]
    layers = tuple(Layer.of_model("", i, i, each) for i, each in enumerate(names))
    sheet = head_figures.picture(Heads("t", layers, numbers))
    cells, bars = sheet.axes[:2]
    assert [text.get_text() for text in cells.texts] == ["0", "1", "5", "2", "3", "4"]
    order = [text.get_text() for text in bars.get_xticklabels()]
    mean = numbers["ablation"].mean
    places = sorted(np.ndindex(mean.shape), key=lambda place: -mean[place])
    assert order == [f"{i}.{names[i][h]}" for i, h in places]


@pytest.mark.parametrize("count", [1, 2])
def test_one_example_has_neither_errors_nor_ranks(count):
    values = np.array([[[3.0, 1.0, 2.0]], [[2.0, 1.5, 3.0]]])[:count]
    column = Column.of_examples(values, "nats", "a label").with_ranks()
    found = _heads({"ablation": column}, (0,))
    names = [x.name for x in found.table().columns]
    assert ("ablation rank" in names) == (count > 1)
    assert ("±" in found.text()) == (count > 1)
    sheet = head_figures.picture(found)
    _, bars = sheet.axes[:2]
    assert len(bars.collections) == (count > 1)  # the lines of errors
    assert ("standard error" in sheet.get_suptitle()) == (count > 1)
    # The heads are still in order.
    heights = [x.get_height() for x in bars.patches]
    assert heights == sorted(column.mean.ravel(), reverse=True)
