"""How rectangles are addressed: positions, axes, and what is known while tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import tiles


@pytest.mark.parametrize(
    ("index", "size", "expected"),
    [
        (slice(2, 5), None, [2, 3, 4]),
        (slice(5), None, [0, 1, 2, 3, 4]),
        (slice(5, 1, -2), None, [5, 3]),
        (slice(None), 3, [0, 1, 2]),
        (slice(-2, None), 5, [3, 4]),
        (slice(None, None, -1), 3, [2, 1, 0]),
        (slice(2, 99), 4, [2, 3]),
        (range(4, 0, -2), None, [4, 2]),
        (range(0), None, []),
        (range(3, 3), 5, []),
        (np.asarray([3, 1, 1]), None, [3, 1, 1]),
        (np.asarray([-1, 0]), 4, [3, 0]),
        (jnp.asarray([-1, 0]), 4, [3, 0]),
        ([2, 0], None, [2, 0]),
    ],
)
def test_positions_are_those_that_an_index_names(index, size, expected):
    found = tiles.positions(index, size)
    assert jnp.issubdtype(found.dtype, jnp.integer)
    np.testing.assert_array_equal(found, np.asarray(expected, int))


@pytest.mark.parametrize(
    ("index", "size", "message"),
    [
        (slice(None), None, "a slice with ends of at least 0"),
        (slice(-2, 3), None, "a slice with ends of at least 0"),
        (3, 5, r"one axis of integers, got int64 of shape \(\)"),
        (np.ones([2, 2], int), 5, r"one axis of integers, got int64 of shape \(2, 2\)"),
        (np.asarray([0.0, 1.0]), 5, "one axis of integers, got float64"),
        (np.asarray([True, False]), 5, "one axis of integers, got bool"),
        (np.asarray([0, 5]), 5, r"must be in -5..4, got 0..5"),
        (jnp.asarray([-6, 0]), 5, r"must be in -5..4, got -6..0"),
        (range(3, 7), 5, r"must be in -5..4, got 3..6"),
    ],
)
def test_positions_that_are_none_are_refused(index, size, message):
    with pytest.raises(ValueError, match=message):
        tiles.positions(index, size)


def test_traced_positions_pass_unseen():
    found = jax.jit(lambda index: tiles.positions(index, 5))(jnp.asarray([4, 0]))
    np.testing.assert_array_equal(found, [4, 0])


@pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray])
def test_take_picks_positions_and_spreads_an_axis_of_size_one(to_array):
    array = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(
        tiles.take(to_array(array), to_array([2, 0]), axis=-1), array[:, [2, 0]]
    )
    np.testing.assert_array_equal(
        tiles.take(to_array(array[:1]), to_array([7, 0, 3]), axis=0), array[[0, 0, 0]]
    )


def test_take_refuses_known_positions_outside_of_the_axis():
    for index in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"positions must be in 0..2 here, got"):
            tiles.take(np.arange(3), np.asarray(index), axis=0)


def test_check_axes_lets_axes_be_of_size_one_and_names_both_shapes():
    tiles.check_axes("x", np.ones([2, 1, 3]), (2, 5, 3), "[B, T, S]")
    for shape in [(2, 5), (2, 5, 4), (1, 2, 5, 3)]:
        with pytest.raises(ValueError) as error:
            tiles.check_axes("x", np.ones(shape), (2, 5, 3), "[B, T, S]")
        assert str(error.value) == (
            "x must be [B, T, S], which is (2, 5, 3) here (an axis may have size 1); "
            f"got shape {shape}."
        )


def test_largest_and_smallest_stay_integers_where_both_are_known():
    assert tiles.largest(2, 5) == 5 and isinstance(tiles.largest(2, 5), int)
    assert tiles.smallest(2, 5) == 2 and isinstance(tiles.smallest(2, 5), int)
    ends = jax.jit(lambda x: (tiles.largest(x, 3), tiles.smallest(3, x)))(4)
    assert tuple(map(int, ends)) == (4, 3)


def test_a_span_is_a_pytree_whose_integers_stay_known():
    span = tiles.Span(3, 5)
    assert jax.tree.leaves(span) == []
    assert len(span) == 5 and span.stop == 8 and span + 2 == tiles.Span(5, 5)
    np.testing.assert_array_equal(jax.jit(tiles.Span.array)(span), range(3, 8))

    def moved(span):
        assert isinstance(span.size, int)
        return span + 2

    moved_span = jax.jit(moved)(tiles.Span(jnp.asarray(3), 5))
    np.testing.assert_array_equal(moved_span.array(), range(5, 10))
    with pytest.raises(TypeError, match="unpack"):
        start, size = span
