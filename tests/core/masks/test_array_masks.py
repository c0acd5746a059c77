"""Masks made of arrays: lengths, segment ids, and masks spelled out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks

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


@pytest.mark.parametrize(
    "make",
    [
        masks.padding,
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


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1], "lengths must be at least 0, got -1"),
        ([3.0, 1.0], "lengths must be integers, got float64"),
        ([True, False], "lengths must be integers, got bool"),
    ],
)
def test_lengths_that_are_no_lengths_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        masks.padding(np.asarray(lengths))


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


def test_segments_of_queries_are_those_of_keys_where_none_are_given():
    ids = np.asarray([[0, 0, 1, 1], [0, 1, 1, 2]])
    expected = [[[q == k for k in row] for q in row] for row in ids]
    np.testing.assert_array_equal(masks.segments(ids).array(T, T), expected)


@pytest.mark.parametrize("shape", [(T, S), (B, T, S), (B, H, T, S), (B, 1, 1, S)])
@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8])
@pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray])
def test_dense_mask_is_the_array(shape, dtype, to_array):
    array = np.random.default_rng(0).random(shape) < 0.5
    mask = masks.dense(to_array(array.astype(dtype)))
    expected = np.broadcast_to(array, (*shape[:-2], T, S))
    np.testing.assert_array_equal(mask.array(T, S), expected)
    assert mask.array(T, S).dtype == bool


def test_rank_and_not_size_decides_the_meaning_of_an_array():
    # B = H, so that sizes could not tell the two apart.
    batch, num_heads = 3, 3
    array = np.random.default_rng(0).random([batch, T, S]) < 0.5
    mask, at = masks.dense(array), (np.arange(T), np.arange(S))
    per_example = mask.aligned(1).aligned_tile(*at)
    per_head = mask.aligned(0).aligned_tile(*at)
    np.testing.assert_array_equal(per_example, array[:, None])
    np.testing.assert_array_equal(per_head, array)
    masks.dense(array).check((batch,), num_heads, T, S)
    masks.dense(array).check((), num_heads, T, S)


def test_as_mask_takes_masks_arrays_and_nothing():
    causal = masks.causal()
    assert masks.as_mask(causal) is causal
    assert isinstance(masks.as_mask(None), masks.Full)
    array = np.tri(T, S, dtype=bool)
    np.testing.assert_array_equal(masks.as_mask(array).array(T, S), array)
    np.testing.assert_array_equal(masks.as_mask(array.tolist()).array(T, S), array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full([T, S], 2), r"0/1 integers, got other integers.*masks.padding"),
        (np.full([T, S], -1), r"0/1 integers, got other integers"),
        (np.ones([S], bool), r"got shape \(5,\); for lengths use .*padding"),
        (np.ones([], bool), r"got shape \(\)"),
        (np.full([T, S], "x"), r"must be boolean or 0/1 integers"),
    ],
)
def test_array_that_is_no_mask_is_refused(array, message):
    with pytest.raises(ValueError, match=message):
        masks.dense(array)


@pytest.mark.parametrize("shape", [(T, S), (B, S), (S, S), (B, S, T), (H, B, T, S)])
def test_dense_mask_of_another_shape_is_refused_with_both_shapes(shape):
    mask = masks.dense(np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"mask must be \[B..., T, S\]") as error:
        mask.check((B,), H, T, S)
    wanted = (B, H, T, S) if len(shape) == 4 else (B, T, S)
    assert str(wanted) in str(error.value)
    assert f"got shape {shape}" in str(error.value)


def test_dense_mask_has_no_tiles_outside_of_its_array():
    mask = masks.dense(np.ones([T, S], bool))
    with pytest.raises(ValueError, match=rf"positions must be in 0..{T - 1}"):
        mask.array(T + 1, S)
    with pytest.raises(ValueError, match=rf"positions must be in 0..{S - 1}"):
        mask.tile(range(T), range(1, S + 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0, 1.0],), "query_ids must be integers, got float64"),
        (([0, 1], [0.0, 1.0]), "key_ids must be integers, got float64"),
        ((3,), r"segment ids must be \[B..., T\] and \[B..., S\], got shapes \(\)"),
        (([0, 1], [[0, 1]]), r"got shapes \(2,\) and \(1, 2\)"),
    ],
)
def test_ids_that_are_no_segments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        masks.segments(*map(np.asarray, arguments))


def test_segments_of_another_shape_are_refused_with_both_shapes():
    ids, other_ids = np.zeros([B, T], int), np.zeros([B, S], int)
    masks.segments(ids, other_ids).check((B,), H, T, S)
    with pytest.raises(ValueError, match=r"query_ids .*\(2, 4\).*got shape \(2, 5\)"):
        masks.segments(other_ids).check((B,), H, T, S)
    with pytest.raises(ValueError, match=r"key_ids .*\(2, 5\).*got shape \(2, 4\)"):
        masks.segments(ids).check((B,), H, T, S)
