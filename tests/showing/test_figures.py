import io

import numpy as np
import pytest

from mha_haiku.showing import canvas, figures
from tests.showing.saved_maps import make_maps, make_maps_of_kinds

image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def _figure(saved, layer):
    return figures.of_example(saved.only(0, [layer]))


def _panels(sheet):
    return [axes for axes in sheet.axes if axes.get_images()]


def _sizes(saved):
    return [image.open(io.BytesIO(p)).size for _, p in figures.pictures(saved)]


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures of the pictures that are made."""
    sheets, draw = [], figures.of_example

    def keep(*args, **options):
        sheets.append(draw(*args, **options))
        return sheets[-1]

    monkeypatch.setattr(figures, "of_example", keep)
    return sheets


@pytest.mark.slow
def test_pictures_have_the_numbers_of_their_layers_and_name_the_example(load, drawn):
    first, second = make_maps().layers
    layers = first, second._replace(name="layer 7", index=7, number=7)
    saved = load(layers=layers, example={"name": "held-out example 3"})
    assert [name for name, _ in figures.pictures(saved)] == [
        "layer_00.png",
        "layer_07.png",
    ]
    heading = drawn[1].get_suptitle().replace("\n", " ")
    assert "layer 7, held-out example 3 (the first of 2 in index.html)" in heading


@pytest.mark.slow
def test_hostile_text_is_drawn_literally_and_without_a_warning(hostile, drawn):
    ((_, picture),) = figures.pictures(hostile)
    (sheet,) = drawn
    size = sheet.get_size_inches() * canvas.DOTS_PER_INCH
    np.testing.assert_allclose(image.open(io.BytesIO(picture)).size, size, atol=1)
    (panel, *_) = _panels(sheet)
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert shown[2:5] == ["$x^2$", r"$\frac{", "a_b↵"]
    assert all(shown)
    titles = [axes.title for axes in _panels(sheet)]
    for text in [*panel.get_xticklabels(), *titles, sheet._suptitle]:
        assert not text.get_parse_math()


def test_positions_take_the_place_of_many_tokens(load):
    (panel, *_) = _panels(_figure(load(heads=(1,), length=70), 0))
    ticks = [label.get_text() for label in panel.get_xticklabels()]
    assert ticks == ["0", "10", "20", "30", "40", "50", "60"]


def test_pooled_cells_are_marked_with_their_first_position(load, drawn):
    list(figures.pictures(load(heads=(1,), length=100, bins=10)))
    (sheet,) = drawn
    ticks = [label.get_text() for label in _panels(sheet)[0].get_yticklabels()]
    assert ticks == ["0", "20", "40", "60", "80"]
    assert "10 queries" in sheet.get_suptitle()


@pytest.mark.slow
def test_all_layers_share_a_scale_with_a_bar(load, drawn):
    saved = load()
    list(figures.pictures(saved))
    scales = set()
    for sheet in drawn:
        scales |= {axes.get_images()[0].get_clim() for axes in _panels(sheet)}
        assert [a.get_ylabel() for a in sheet.axes][-1].startswith("attention weight")
    ((low, high),) = scales
    largest = max(float(x.max()) for x in saved.examples[0].weights)
    assert low == 0
    assert largest <= high < 1.1 * largest


def test_maps_of_nothing_but_zeros_can_be_drawn(load):
    weights = (np.zeros((1, 5, 5), "f2"),)
    saved = load(heads=(1,), example={"weights": weights}, has_mean=False)
    assert len(_sizes(saved)) == 1


def test_a_layer_without_heads_has_no_picture(load):
    ((name, _),) = figures.pictures(load(heads=(0, 1)))
    assert name == "layer_01.png"


@pytest.mark.slow
def test_kinds_have_pictures_of_their_own_with_frames_where_rows_should_look(load):
    saved = load(make_maps_of_kinds())
    names = [name for name, _ in figures.pictures(saved)]
    assert names == ["encoder_00.png", "decoder_00.png", "cross_00.png"]
    assert not any(axes.collections for axes in _panels(_figure(saved, 1)))
    example, *_ = _panels(_figure(saved, 2))
    labels = [
        [x.get_text() for x in axis.get_ticklabels()]
        for axis in example._axis_map.values()
    ]
    assert labels == [["t0", "t1", "t2", "t3", "t4"], ["a", "b", "c", "<e>"]]
    assert example.get_ylabel() == "query: token predicted"
    rim, _ = example.collections
    ends = {tuple(map(tuple, each.tolist())) for each in rim.get_segments()}
    # The cells (2, 0) and (2, 1) touch: no line between them.
    assert ((-0.5, 1.5), (-0.5, 2.5)) in ends and ((1.5, 1.5), (1.5, 2.5)) in ends
    assert ((0.5, 1.5), (0.5, 2.5)) not in ends
    assert len(ends) == 4 + 4 + 6
