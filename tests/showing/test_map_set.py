"""Sets of maps as files: what comes back, and what is refused."""

import dataclasses
import json
import re

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


_EXAMPLE = ("record", "examples", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_puts("format", 1), "is not in format 3.*again with\n.*dump_attention"),
        (lambda arrays, _: arrays.pop("fields"), "is not in format 3"),
        (_array("fields", np.array("{")), "is not in format 3"),
        (lambda arrays, _: arrays.pop("examples.0.weights.1"), "no array 'examples.0"),
        (_puts("record", None), "the file must be a MapSet, got NoneType"),
        (_puts("record", "layer", []), "a field of the file must be.*mean 'layers'"),
        (_puts(*_EXAMPLE, "name", 3), "examples.0.name must be text, got int"),
        (
            _puts(*_EXAMPLE, "answers", "likeliest", 0, 0, 1, 1e3),
            "probabilities of 'example 1' must be numbers from 0 to 1",
        ),
        (_puts(*_EXAMPLE, "is_mean", 1), "is_mean must be true or false, got int"),
        (_puts(*_EXAMPLE, "queries", []), "queries must be a Axis, got list"),
        (_puts(*_EXAMPLE, "weights", "a"), "weights must be a list, got str"),
        (_puts("record", "step", True), "step must be an integer, got NoneType"),
        (_puts("record", "missing", [["a"]]), "missing.0 must have 2 parts, got 1"),
        (lambda _, fields: fields["record"].pop("layers"), "is incomplete.*'layers'"),
    ],
)
def test_fields_that_do_not_fit_are_refused(load, tmp_path, change, message):
    load()
    path = tmp_path / "maps.npz"
    _broken(path, change)
    with pytest.raises(checks.ConfigError, match=f"(?s)maps.npz.*{message}"):
        map_set.MapSet.load(path)


_WEIGHTS = "weights of layer 0 of 'example 1' must"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weights.0", np.zeros((2, 5, 4), "f2"), "shape (2, 5, 5), got (2, 5, 4)"),
        ("weights.0", np.zeros((5, 5), "f2"), "shape (2, 5, 5), got (5, 5)"),
        ("weights.0", np.full((2, 5, 5), -0.1, "f2"), f"{_WEIGHTS} be numbers from 0"),
        ("weights.0", np.full((2, 5, 5), 1e4, "f2"), f"{_WEIGHTS} be numbers from 0"),
        ("weights.0", np.zeros((2, 5, 5), "i4"), "floating-point, got int32"),
        ("weights.0", np.full((2, 5, 5), np.nan, "f2"), f"{_WEIGHTS} be finite"),
        ("weights.0", np.full((2, 5, 5), np.inf, "f2"), f"{_WEIGHTS} be finite"),
        ("queries.edges", np.array([0, 1, 2, 4, 3, 5]), "rise from 0 to 5"),
        ("queries.edges", np.array([0, 1, 2, 3, 4, 6]), "rise from 0 to 5"),
        ("queries.edges", np.array([0]), "rise from 0 to 5"),
        ("masked.0", np.zeros((5, 5)), "must be booleans, got float64"),
        ("masked.0", np.zeros((4, 5), bool), "shape (5, 5) or (2, 5, 5), got (4, 5)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(load, tmp_path, name, array, message):
    masked = np.zeros((5, 5), bool)
    load(example={"masked": (masked, masked)})
    path = tmp_path / "maps.npz"
    _broken(path, _array(f"examples.0.{name}", array))
    with pytest.raises(checks.ConfigError, match=f"maps.npz: .*{re.escape(message)}"):
        map_set.MapSet.load(path)


@pytest.mark.parametrize("shape", [(2, 5, 5), (2, 5, 4)])
def test_what_would_not_be_loaded_is_not_saved(tmp_path, shape):
    maps = make_maps()
    first, *others = maps.examples
    weights = np.full(shape, np.nan, "f2"), first.weights[1]
    examples = (first._replace(weights=weights), *others)
    broken = dataclasses.replace(maps, examples=examples)
    wanted = "be finite, got NaN" if shape == (2, 5, 5) else r"have shape \(2, 5, 5\)"
    with pytest.raises(ValueError, match=f"of layer 0 of 'example 1' must {wanted}"):
        broken.save(tmp_path / "maps.npz")
    assert not list(tmp_path.iterdir())


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
