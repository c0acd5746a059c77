import re

import numpy as np
import pytest

from mha_haiku import checks
from mha_haiku.report import maps


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
    assert saved.query_edges.tolist() == [0, 3, 6, 9, 10]
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
