"""How rectangles are addressed: positions, axes, and what is known while tracing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import tiles


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
