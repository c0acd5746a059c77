"""Masks of lengths, against statements about examples and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from tests import oracles

B, H, T, S = 2, 3, 4, 5
LENGTHS = np.asarray([3, 0])


@pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray, list])
def test_padding_shows_the_first_keys_of_each_example(to_array):
    expected = [[[s < n for s in range(S)] for _ in range(T)] for n in LENGTHS]
    array = masks.padding(to_array(LENGTHS)).array(T, S)
    np.testing.assert_array_equal(array, expected)


def test_padding_of_queries_blinds_the_later_ones():
    mask = masks.padding(np.asarray([3, 5]), query_lengths=np.asarray([2, 9]))
    expected = [
        [[s < 3 and t < 2 for s in range(S)] for t in range(T)],
        [[True] * S] * T,
    ]
    np.testing.assert_array_equal(mask.array(T, S), expected)


def test_padding_of_no_batch_and_of_two_batch_axes():
    np.testing.assert_array_equal(masks.padding(2).array(T, S), [[1, 1, 0, 0, 0]] * T)
    lengths = np.asarray([[1, 2, 3], [4, 5, 0]])
    expected = np.arange(S) < lengths[..., None, None]
    np.testing.assert_array_equal(
        masks.padding(lengths).array(T, S),
        np.broadcast_to(expected, (2, 3, T, S)),
    )


def test_valid_lens_are_of_examples_or_of_queries():
    per_example = masks.valid_lens(LENGTHS).array(T, S)
    np.testing.assert_array_equal(per_example, masks.padding(LENGTHS).array(T, S))
    per_query = np.asarray([[1, 0, 5, 2], [4, 4, 3, 1]])
    expected = [[[s < n for s in range(S)] for n in row] for row in per_query]
    np.testing.assert_array_equal(masks.valid_lens(per_query).array(T, S), expected)


def test_valid_lens_per_query_take_the_rows_asked_for():
    per_query = np.asarray([[1, 0, 5, 2], [4, 4, 3, 1]])
    mask = masks.valid_lens(per_query)
    expected = np.asarray(mask.array(T, S))
    last = mask.tile(range(2, 4), range(S))
    np.testing.assert_array_equal(last, expected[:, 2:])
    np.testing.assert_array_equal(
        mask.tile(np.asarray([3, 0]), range(1, 4)), expected[:, [3, 0], 1:4]
    )


def test_prefix_is_causal_beyond_the_keys_everyone_sees():
    expected = [[[s <= t or s < n for s in range(S)] for t in range(T)] for n in (3, 0)]
    np.testing.assert_array_equal(masks.prefix(LENGTHS).array(T, S), expected)


@pytest.mark.parametrize(
    "make",
    [
        masks.padding,
        masks.valid_lens,
        lambda lengths: masks.padding(lengths, lengths),
        lambda lengths: masks.padding(lengths) & masks.window(None, 9),
    ],
)
def test_key_range_ends_at_the_longest_example(make):
    assert make(np.asarray([3, 1])).key_range((0, T), (0, S)) == (0, 3)
    assert make(jnp.asarray([3, 1])).key_range((0, T), (0, S)) == (0, 3)
    assert make(np.asarray([0, 0])).key_range((0, T), (0, S)) == (0, 0)
    traced = jax.jit(lambda lengths: make(lengths).key_range((0, T), (0, S))[1])
    assert traced(jnp.asarray([3, 1])) == 3
    assert traced(jnp.asarray([S + 4, 1])) == S


def test_unseen_keys_and_fully_masked_queries_of_padding():
    mask = masks.padding(np.asarray([3, 0]), np.asarray([2, 4]))
    unseen, blind = oracles.unseen_and_masked(mask, T, S)
    np.testing.assert_array_equal(unseen, [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(blind, [[0, 0, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("make", [masks.padding, masks.valid_lens, masks.prefix])
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1], "lengths must be at least 0, got -1"),
        ([3.0, 1.0], "lengths must be integers, got float64"),
        ([True, False], "lengths must be integers, got bool"),
    ],
)
def test_lengths_that_are_no_lengths_are_refused(make, lengths, message):
    with pytest.raises(ValueError, match=message):
        make(np.asarray(lengths))


def test_query_lengths_are_checked_like_lengths():
    with pytest.raises(ValueError, match="query_lengths must be at least 0, got -2"):
        masks.padding(LENGTHS, np.asarray([1, -2]))
    with pytest.raises(ValueError, match="query_lengths must be integers"):
        masks.padding(LENGTHS, np.asarray([1.0, 2.0]))
    with pytest.raises(
        ValueError, match=r"same batch axes, got shapes \(2,\) and \(\)"
    ):
        masks.padding(LENGTHS, 3)


MAKERS = {
    "padding": masks.padding,
    "valid lens": masks.valid_lens,
    "prefix": masks.prefix,
    "inside an intersection": lambda n: masks.causal() & masks.padding(n),
    "inside a complement": lambda n: ~masks.padding(n),
}


@pytest.mark.parametrize("name", MAKERS)
def test_known_lengths_beyond_the_keys_are_refused(name):
    mask = MAKERS[name](np.asarray([3, S + 1]))
    message = rf"lengths must be in 0..S = 0..{S}, got {S + 1}"
    with pytest.raises(ValueError, match=message):
        mask.array(T, S)
    with pytest.raises(ValueError, match=message):
        mask.check((B,), H, T, S)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: mask.array(T, S))()  # closed over, so known while tracing
    mask.check((B,), H, T, S + 1)


@pytest.mark.parametrize("name", MAKERS)
def test_traced_lengths_are_not_known_and_pass(name):
    traced = jax.jit(lambda lengths: MAKERS[name](lengths).array(T, S))
    traced(jnp.asarray([3, S + 1]))


@pytest.mark.parametrize(
    ("mask", "axes"),
    [
        (masks.padding(np.asarray([1, 2, 3])), r"\[B...\]"),
        (masks.padding(2), r"\[B...\]"),
        (masks.padding(np.ones([B, T], int)), r"\[B...\]"),
        (masks.padding(np.ones([B], int), np.ones([3], int)), r"\[B...\]"),
        (masks.valid_lens(np.ones([B, T + 1], int)), r"\[B...\] or \[B..., T\]"),
        (masks.valid_lens(np.ones([B, 1, T], int)), r"\[B...\] or \[B..., T\]"),
    ],
)
def test_lengths_of_another_shape_are_refused_with_both_shapes(mask, axes):
    with pytest.raises(ValueError, match=f"lengths must be {axes}") as error:
        mask.check((B,), H, T, S)
    assert f"({B}," in str(error.value)
    assert "got shape (" in str(error.value)
