"""Sets of maps as files: what comes back, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mha_haiku.core import arrays as array_files
from mha_haiku.core import checks
from mha_haiku.records import map_set
from tests.showing.saved_maps import make_maps, make_maps_of_kinds


def _assert_same(found, wanted):
    """Asserts that two records are equal in values, types and dtypes."""
    if dataclasses.is_dataclass(wanted):
        found, wanted = vars(found), vars(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
        if isinstance(other, np.ndarray) and other.dtype != object:
            assert one.dtype.kind == other.dtype.kind and one.shape == other.shape
            assert one.dtype.kind == "U" or one.dtype == other.dtype


def test_a_set_comes_back_as_it_was_saved(whole, load):
    for maps in (*whole.sets, make_maps(bins=2, length=7), make_maps_of_kinds()):
        _assert_same(load(maps), maps)


def test_text_that_is_hard_to_store_comes_back(load, hostile):
    again = load(hostile)
    assert again.examples[0].queries.tokens == hostile.examples[0].queries.tokens
    assert "\ud800" in again.examples[0].queries.tokens
    odd = ("a\x00", "", "\x00")
    maps = make_maps(heads=(1,), length=3, tokens=[odd] * 2)
    assert load(maps).examples[0].keys.tokens == odd


def test_arrays_have_the_names_of_their_places_and_are_stored_once(load, tmp_path):
    masked = np.triu(np.ones((5, 5), bool), 1)
    maps = load(example={"masked": (masked, masked)})
    assert maps.examples[0].masked[0] is maps.examples[1].masked[1]
    with np.load(tmp_path / "maps.npz", allow_pickle=False) as arrays:
        weights = arrays["examples.0.weights.1"]
        np.testing.assert_array_equal(weights, maps.examples[0].weights[1])
        assert [name for name in arrays if "masked" in name] == ["examples.0.masked.0"]


def test_a_layer_may_have_no_heads_left(load):
    assert load(heads=(0, 2)).examples[0].weights[0].shape == (0, 5, 5)


def test_pooled_sets_are_told_from_whole_ones():
    for make in (make_maps, make_maps_of_kinds):
        whole, pooled = make(), make(bins=2)
        assert not any(whole.inputs[0].axes(x).pooling for x in whole.layers)
        assert all(pooled.inputs[0].axes(x).pooling for x in pooled.layers)


def _broken(path, change):
    """Saves a file again, with other arrays and fields."""
    arrays = array_files.read_npz(path)
    text = arrays["fields"]
    fields = json.loads(str(text))
    change(arrays, fields)
    if arrays.get("fields") is text:
        arrays["fields"] = np.array(json.dumps(fields))
    np.savez(path, **arrays)


def _puts(*places):
    *inner, last, value = places

    def change(arrays, fields):
        part = fields
        for place in inner:
            part = part[place]
        part[last] = value

    return change


def _array(name, value):
    return lambda arrays, fields: arrays.update({name: value})


@pytest.mark.parametrize(
    "change", [_puts("format", 1), lambda arrays, _: arrays.pop("fields")]
)
def test_another_format_is_refused(load, tmp_path, change):
    load()
    path = tmp_path / "maps.npz"
    _broken(path, change)
    with pytest.raises(
        checks.ConfigError, match="(?s)maps.npz is not in.*with\n.*dump"
    ):
        map_set.MapSet.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(checks.ConfigError, match=r"maps\.npz does not exist"):
        map_set.MapSet.load(tmp_path / "maps.npz")


def test_a_damaged_archive_is_refused(load, tmp_path):
    load()
    path = tmp_path / "maps.npz"
    whole = path.read_bytes()
    for content in (b"", b"not a zip", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(checks.ConfigError, match="not a readable"):
            map_set.MapSet.load(path)


def test_nothing_is_unpickled(load, tmp_path):
    load()
    name, array = "examples.0.weights.0", np.array([{"an": "object"}], dtype=object)
    _broken(tmp_path / "maps.npz", _array(name, array))
    with pytest.raises(checks.ConfigError, match="allow_pickle"):
        map_set.MapSet.load(tmp_path / "maps.npz")


def test_a_field_that_came_later_has_its_default(load, tmp_path):
    load()
    _broken(tmp_path / "maps.npz", lambda _, fields: fields["record"].pop("missing"))
    assert map_set.MapSet.load(tmp_path / "maps.npz").missing == ()


def test_cells_hold_the_aligned_pairs_of_their_positions():
    alignment = np.zeros((4, 5), bool)
    alignment[[1, 3], [4, 0]] = True
    queries = map_set.Axis(("",) * 4, np.array([0, 2, 4]))
    keys = map_set.Axis(("",) * 5, np.array([0, 1, 3, 5]))
    cells = map_set.Axes(queries, keys, alignment).aligned_cells()
    assert cells.tolist() == [[False, False, True], [True, False, False]]
