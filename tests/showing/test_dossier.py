import dataclasses
import re

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.records import map_set
from tests.showing.saved_maps import make_maps_of_kinds


def _changed(whole, **changes):
    """Returns the dossier with another first example."""
    first, second = whole.sets
    example = first.examples[0]._replace(**changes)
    first = dataclasses.replace(first, examples=(example,))
    return whole._replace(sets=(first, second))


def test_a_whole_dossier_fits(whole):
    assert whole.check() is whole


def test_maps_without_heads_or_queries_fit():
    axis = map_set.Axis.whole(())
    example = map_set.Example("", axis, axis, (np.zeros((2, 0, 0)),))
    layer = records.Layer("", ("0", "1"))
    map_set.Dossier("", (map_set.MapSet("", (layer,), (example,)),)).check()
    axis = map_set.Axis.whole("ab")
    example = map_set.Example("", axis, axis, (np.zeros((0, 2, 2)),))
    layer = records.Layer("", ())
    map_set.Dossier("", (map_set.MapSet("", (layer,), (example,)),)).check()


_AXIS = map_set.Axis.whole("abcdef")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": _AXIS}, "shape (2, 6, 5), got (2, 3, 5)"),
        ({"queries": map_set.Axis(("a",) * 3, np.array([0, 2]))}, "rise from 0 to 3"),
        ({"weights": (np.zeros((2, 3, 5)),)}, "one for each of 2 layers, got 1"),
        (
            {"weights": (np.full((2, 3, 5), np.inf), np.zeros((1, 3, 5)))},
            "weights of layer 0 of 'held-out example 3' must be finite (or NaN), got",
        ),
        ({"weights": (np.zeros((2, 3, 5), int),) * 2}, "floating-point, got int64"),
        (
            {"masked": (np.zeros((5, 3), bool),) * 2},
            "shape (3, 5) or (2, 3, 5), got (5, 3)",
        ),
        ({"masked": (None,)}, "one for each of 2 layers, got 1"),
        (
            {"answers": map_set.Answers(("a",), ((),) * 3)},
            "targets of 'held-out example 3' must be one for each of 3 positions, got",
        ),
        (
            {"answers": map_set.Answers(("a",), ((("a", 1.0),) * 4,), True)},
            "at most 3 answers for each position, got 4",
        ),
        (
            {"images": np.zeros((6, 2, 3), np.uint8)},
            "one for each of 5 positions, got 6",
        ),
        ({"images": np.zeros((5, 2, 3))}, "uint8, got float64"),
        ({"images": np.zeros(5, np.uint8)}, "[S, h, w, 3], got (5,)"),
        ({"images": np.zeros((5, 2, 3, 4), np.uint8)}, "[S, h, w, 3], got"),
        ({"images": np.zeros((5, 0, 3), np.uint8)}, "[S, h, w, 3], got (5, 0, 3)"),
    ],
)
def test_parts_of_an_example_that_do_not_fit_are_refused(whole, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _changed(whole, **changes).check()


def test_a_page_of_nothing_is_refused(whole):
    first, second = whole.sets
    with pytest.raises(ValueError, match="sets must not be empty"):
        whole._replace(sets=()).check()
    with pytest.raises(ValueError, match="examples of 'one' must not be empty"):
        shown = dataclasses.replace(first, examples=())
        whole._replace(sets=(shown, second)).check()


def test_an_alignment_has_the_sizes_of_its_axes():
    maps = make_maps_of_kinds()
    example = maps.examples[0]
    cross = example.axes(maps.layers[2])
    wrong = cross._replace(alignment=np.ones((5, 4), bool))
    example = example._replace(kinds={**example.kinds, "cross": wrong})
    with pytest.raises(ValueError, match="alignment of 'example 1' must have shape"):
        dataclasses.replace(maps, examples=(example,)).check()
