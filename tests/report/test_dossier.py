import re

import numpy as np
import pytest

from mha_haiku.report import dossier
from tests.report.conftest import archive_of_kinds


def _changed(whole, **changes):
    """Returns the dossier with another first example."""
    first, second = whole.sets
    example = first.examples[0]._replace(**changes)
    return whole._replace(sets=(first._replace(examples=(example,)), second))


def test_a_whole_dossier_fits(whole):
    assert dossier.check(whole) is whole


def test_maps_without_heads_or_queries_fit():
    axis = dossier.Axis.whole(())
    example = dossier.Example("", axis, axis, (np.zeros((2, 0, 0)),))
    layer = dossier.Layer("", ("0", "1"))
    dossier.check(dossier.Dossier("", (dossier.MapSet("", (layer,), (example,)),)))
    axis = dossier.Axis.whole("ab")
    example = dossier.Example("", axis, axis, (np.zeros((0, 2, 2)),))
    layer = dossier.Layer("", ())
    dossier.check(dossier.Dossier("", (dossier.MapSet("", (layer,), (example,)),)))


_AXIS = dossier.Axis.whole("abcdef")
_PATCH = dossier.Patch(0, 0, np.arange(3), np.arange(4), np.zeros((2, 3)))
_GRID = dossier.Images(np.zeros((8, 8), np.uint8), "grid", 2, 2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": _AXIS}, "shape (2, 6, 5), got (2, 3, 5)"),
        ({"queries": dossier.Axis(("a",) * 3, np.array([0, 2]))}, "rise from 0 to 3"),
        ({"weights": (np.zeros((2, 3, 5)),)}, "one for each of 2 layers, got 1"),
        (
            {"weights": (-np.ones((2, 3, 5)), np.zeros((1, 3, 5)))},
            "weights of layer 0 of 'held-out example 3' must be finite and at least 0",
        ),
        ({"weights": (np.zeros((2, 3, 5), int),) * 2}, "floating-point, got int64"),
        ({"masked": np.zeros((5, 3), bool)}, "shape (3, 5) or (2, 3, 5), got (5, 3)"),
        ({"masked": (None,)}, "one for each of 2 layers, got 1"),
        ({"channels": ()}, "one for each of 2 layers, got 0"),
        (
            {"answers": dossier.Answers(("a",), ((),) * 3)},
            "targets of 'held-out example 3' must be one for each of 3 positions, got",
        ),
        (
            {"answers": dossier.Answers(("a",), ((("a", 1.0),) * 4,), True)},
            "at most 3 answers for each position, got 4",
        ),
        (
            {"images": dossier.Images(np.zeros((6, 2, 3), np.uint8))},
            "one for each of 5 positions, got 6",
        ),
        ({"images": dossier.Images(np.zeros((5, 2, 3)))}, "uint8, got float64"),
        ({"images": _GRID._replace(pixels=np.zeros(3, np.uint8))}, "[h, w, 3], got"),
        ({"images": _GRID._replace(kind="rows")}, "'positions' or 'grid', got 'rows'"),
        ({"images": _GRID._replace(columns=3)}, "at most 4 patches from position 1"),
        ({"images": _GRID._replace(rows=0)}, "rows and columns, got 0 x 2"),
        ({"patches": (_PATCH._replace(layer=2),)}, "of its layers, got 2"),
        ({"patches": (_PATCH._replace(head=2),)}, "of its heads, got 2"),
        ({"patches": (_PATCH._replace(key_edges=np.array([1, 0])),)}, "that rise"),
        (
            {"patches": (_PATCH._replace(query_edges=np.array([2, 3, 4])),)},
            "in its 3 positions, got 2 to 4",
        ),
        ({"patches": (_PATCH._replace(weights=np.ones((3, 2))),)}, "shape (2, 3), got"),
    ],
)
def test_parts_of_an_example_that_do_not_fit_are_refused(whole, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dossier.check(_changed(whole, **changes))


def test_numbers_and_matches_that_do_not_fit_are_refused(whole):
    first, second = whole.sets
    mean = np.zeros((1, 2))
    number = first.numbers["ablation"]
    for wrong, message in (
        (number._replace(mean=mean), "ablation of 'one' must have shape (2, 2), got"),
        (number._replace(ranks=mean), "ranks of ablation of 'one' must have shape"),
    ):
        shown = first._replace(numbers={"ablation": wrong})
        with pytest.raises(ValueError, match=re.escape(message)):
            dossier.check(whole._replace(sets=(shown, second)))
    with pytest.raises(ValueError, match="scores of roles of 'one' must have shape"):
        roles = first.roles._replace(scores=mean)
        dossier.check(whole._replace(sets=(first._replace(roles=roles), second)))
    with pytest.raises(
        ValueError, match=re.escape("matches must have shape (2, 2, 2)")
    ):
        dossier.check(whole._replace(matches=mean))
    with pytest.raises(ValueError, match="matches must be None"):
        dossier.check(whole._replace(sets=(first,)))
    with pytest.raises(ValueError, match="sets must not be empty"):
        dossier.check(whole._replace(sets=()))
    with pytest.raises(ValueError, match="examples of 'one' must not be empty"):
        dossier.check(whole._replace(sets=(first._replace(examples=()), second)))


def test_saved_maps_become_a_set(load):
    saved = load(length=10, bins=4, lengths=np.array([10, 7]))
    maps = dossier.of_maps(saved)
    dossier.check(dossier.Dossier("", (maps,)))
    assert maps.name == saved.title
    assert maps.layers[1] == dossier.Layer("layer 1", ("0", "1", "2"))
    first, second, mean = maps.examples
    assert first.keys.is_pooled
    assert second.keys.edges.tolist() == [0, 3, 6, 7]
    assert second.keys.tokens == tuple(f"t{i}" for i in range(7))
    assert mean.weights[1].shape == (3, 4, 4)
    assert mean.name == "mean of 7 examples"
    assert mean.answers is None


def test_each_kind_of_saved_layers_has_its_axes_and_its_alignment(load):
    saved = load(archive_of_kinds())
    maps = dossier.of_maps(saved)
    dossier.check(dossier.Dossier("", (maps,)))
    first, second, mean = maps.examples
    encoder, decoder, cross = (second.axes(layer) for layer in maps.layers)
    assert [encoder.has_answers, cross.has_answers] == [False, True]
    assert decoder.keys.tokens == ("<s>", "d")
    assert (cross.queries.tokens, cross.keys.tokens) == (
        ("d", "<e>"),
        ("t0", "t1", "t2"),
    )
    assert cross.queries.notes == ("reads “<s>”", "reads “d”")
    assert second.answers.targets == ("d", "<e>")
    assert second.note == (
        "its last 2 source positions and its last 2 target positions are padding"
    )
    cross = first.axes(maps.layers[2])
    np.testing.assert_array_equal(cross.alignment, saved.alignment[0])
    assert mean.axes(maps.layers[2]).alignment is None
    wrong = first.kinds | {"cross": cross._replace(alignment=np.ones((5, 4), bool))}
    shown = dossier.Dossier(
        "", (maps._replace(examples=(first._replace(kinds=wrong),)),)
    )
    with pytest.raises(ValueError, match="alignment of 'example 1' must have shape"):
        dossier.check(shown)
