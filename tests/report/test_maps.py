import re

import numpy as np
import pytest

from mha_haiku import checks
from mha_haiku.report import dossier, maps
from tests.report.conftest import archive_of_kinds


def test_loads_what_a_run_saves(load):
    saved = load()
    assert saved.title == "reverse, step 20"
    assert saved.layer_names == ("layer 0", "layer 1")
    assert saved.head_names[1] == ("head 0", "head 1", "head 2")
    assert [w.shape for w in saved.weights] == [(2, 2, 5, 5), (2, 3, 5, 5)]
    assert [m.shape for m in saved.means] == [(2, 5, 5), (3, 5, 5)]
    assert (saved.num_layers, saved.num_examples, saved.mean_examples) == (2, 2, 7)
    assert not saved.pooled


def test_means_may_be_absent(load):
    saved = load(mean_examples=None, mean_00=None, mean_01=None)
    assert saved.means is None
    assert saved.mean_examples == 0


def test_a_layer_may_have_no_heads_left(load):
    assert load(heads=(0, 2)).weights[0].shape == (2, 0, 5, 5)


def test_only_bins_that_hold_valid_positions_are_shown(load):
    saved = load(length=10, bins=4, lengths=np.array([10, 4]))
    assert saved.sides[""][0].edges.tolist() == [0, 3, 6, 9, 10]
    assert saved.pooled
    assert saved.shown_cells(0) == (4, 4)
    assert saved.shown_cells(1) == (2, 2)


def test_an_example_of_no_length_still_shows_a_cell(load):
    assert load(lengths=np.array([0, 5])).shown_cells(0) == (1, 1)


@pytest.mark.parametrize(
    "name",
    "layer_01 heads_00 layer_names tokens query_edges key_edges lengths predictions "
    "targets title mean_01 mean_examples".split(),
)
def test_a_missing_array_is_named(load, name):
    with pytest.raises(checks.ConfigError, match=f"no array '{name}'"):
        load(**{name: None})


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("layer_00", np.zeros((2, 2, 5, 4), "f2"), "shape (2, 2, 5, 5), got"),
        ("layer_00", np.zeros((2, 5, 5), "f2"), "shape (2, 2, 5, 5), got (2, 5, 5)"),
        ("layer_00", np.zeros((2, 2, 5, 5), "i4"), "floating-point numbers, got int32"),
        ("layer_01", np.full((2, 3, 5, 5), np.nan, "f2"), "finite weights"),
        ("layer_01", np.full((2, 3, 5, 5), np.inf, "f2"), "finite weights"),
        ("layer_01", np.full((2, 3, 5, 5), -0.5, "f2"), "at least 0"),
        ("mean_01", np.zeros((2, 5, 5), "f4"), "shape (3, 5, 5), got (2, 5, 5)"),
        ("heads_01", np.array(["head 0"]), "layer_01 must have shape (2, 1, 5, 5)"),
        ("layer_names", np.array(["layer 0"]), "layer_01 has no name"),
        ("tokens", np.zeros((2, 5), "i4"), "text, got int32"),
        ("tokens", np.zeros((0, 5), "U1"), "at least one example"),
        ("query_edges", np.array([0, 1, 2, 4, 3, 5]), "rise from 0 to 5"),
        ("key_edges", np.array([0, 1, 2, 3, 4, 6]), "rise from 0 to 5"),
        ("key_edges", np.array([0]), "rise from 0 to 5"),
        ("lengths", np.array([5, 6]), "from 0 to 5, got [5, 6]"),
        ("lengths", np.array([5]), "shape (2,), got (1,)"),
        ("predictions", np.full((2, 3), "a"), "shape (2, 5) or (2, 1), got (2, 3)"),
        ("targets", np.full((2, 1), "a"), "shape (2, 5), got (2, 1)"),
        ("title", np.array(["a", "b"]), "shape (), got (2,)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(load, name, array, message):
    with pytest.raises(checks.ConfigError, match=re.escape(message)):
        load(**{name: array})


_PARTS = {
    "masked": np.triu(np.ones((2, 5, 5), bool), 1),
    "likeliest": np.full((2, 5, 3), "a"),
    "probabilities": np.full((2, 5, 3), 0.25),
    "places_00": np.array([[[[0, 0, 1], [2, 2, 1]]] * 2] * 2),
    "patches_00": np.full((2, 2, 2, 4, 4), 0.5, "f2"),
    "places_01": np.zeros((2, 3, 0, 3), int),
    "patches_01": np.zeros((2, 3, 0, 4, 4), "f2"),
    "images": np.zeros((2, 5, 3, 4), np.uint8),
}


def test_what_came_later_is_read_where_it_is(load):
    saved = load(lengths=np.array([5, 4]), **_PARTS)
    maps = dossier.of_maps(saved)
    dossier.check(dossier.Dossier("", (maps,)))
    first, second, _ = maps.examples
    assert (first.masked_cells(1) == np.triu(np.ones((5, 5)), 1)).all()
    assert second.masked_cells(0).shape == (4, 4)
    assert first.answers.likeliest[2] == (("a", 0.25),) * 3
    assert first.images.pixels.shape == (5, 3, 4)
    assert second.images.pixels.shape == (4, 3, 4)
    # Two of each head of layer 0, the second of which starts at position 2.
    assert [each.head for each in first.patches] == [0, 0, 1, 1]
    assert first.patches[1].key_edges.tolist() == [2, 3, 4, 5]
    assert second.patches[1].weights.shape == (2, 2)


def test_masks_may_differ_by_layer_and_head(load):
    by_layer = np.zeros((2, 5, 5), bool)
    by_head = np.ones((2, 3, 5, 5), bool)
    saved = load(masked_00=by_layer, masked_01=by_head)
    example = dossier.of_maps(saved).examples[0]
    assert example.masked_cells(0).shape == (5, 5)
    assert example.masked_cells(1).shape == (3, 5, 5)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("masked", np.zeros((2, 5, 5)), "masked must hold booleans, got float64"),
        ("masked", np.zeros((2, 4, 5), bool), "shape (2, 5, 5), got (2, 4, 5)"),
        ("likeliest", np.full((2, 4, 3), "a"), "shape (2, 5, any), got (2, 4, 3)"),
        ("probabilities", np.ones((2, 5, 2)), "shape (2, 5, 3), got (2, 5, 2)"),
        ("places_00", np.zeros((2, 2, 2, 3), int), "widths of at least 1"),
        ("patches_00", np.zeros((2, 2, 1, 4, 4), "f2"), "shape (2, 2, 2, 4, 4), got"),
        ("images", np.zeros((2, 5, 3, 4), np.uint16), "images must hold uint8"),
        ("images", np.zeros((2, 4, 3, 4), np.uint8), "images must have shape (2, 5,"),
    ],
)
def test_what_came_later_must_fit_too(load, name, array, message):
    with pytest.raises(checks.ConfigError, match=re.escape(message)):
        load(**{**_PARTS, name: array})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(checks.ConfigError, match=r"maps\.npz does not exist"):
        maps.load(tmp_path / "maps.npz")


def test_a_damaged_archive_is_refused(make):
    path = make() / "maps.npz"
    whole = path.read_bytes()
    for content in (b"", b"not a zip", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(checks.ConfigError, match="not a readable"):
            maps.load(path)


def test_a_lone_array_is_refused(tmp_path):
    with open(tmp_path / "maps.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(checks.ConfigError, match="not a readable"):
        maps.load(tmp_path / "maps.npz")


def test_nothing_is_unpickled(load):
    with pytest.raises(checks.ConfigError, match="allow_pickle"):
        load(title=np.array([{"an": "object"}], dtype=object))


def test_kinds_of_layers_have_their_own_axes(load):
    saved = load(archive_of_kinds())
    assert [weights.shape for weights in saved.weights] == [
        (2, 2, 5, 5),
        (2, 3, 4, 4),
        (2, 2, 4, 5),
    ]
    assert [saved.shown_cells(1, layer) for layer in range(3)] == [
        (3, 3),
        (2, 2),
        (2, 3),
    ]
    queries, keys = saved.sides["cross"]
    assert queries.tokens[0].tolist() == ["a", "b", "c", "<e>"]
    assert queries.notes[0, 1] == "reads “a”"
    assert (queries.label, keys.label) == ("token predicted", "source token")
    assert not saved.pooled and load(archive_of_kinds(bins=2)).pooled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": np.array(["encoder", "decoder", "other"])}, "got 'other'"),
        ({"decoder_lengths": np.array([5, 2])}, "decoder_lengths must be from 0 to 4"),
        ({"decoder_edges": np.arange(6)}, "decoder_edges must rise from 0 to 4"),
        ({"alignment": np.zeros((2, 5, 4), bool)}, "alignment must have shape"),
        ({"decoder_predicted": None}, "no array 'decoder_predicted'"),
        ({"layer_02": np.zeros((2, 2, 5, 4), "f2")}, "layer_02 must have shape"),
        ({"predictions": np.full((2, 5), "a")}, "predictions must have shape"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(load, changes, message):
    with pytest.raises(checks.ConfigError, match=re.escape(message)):
        load(archive_of_kinds(**changes))


def test_cells_hold_the_aligned_pairs_of_their_positions():
    alignment = np.zeros((4, 5), bool)
    alignment[[1, 3], [4, 0]] = True
    cells = maps.cells_of(alignment, np.array([0, 2, 4]), np.array([0, 1, 3, 5]))
    assert cells.tolist() == [[False, False, True], [True, False, False]]
