"""Masks made of arrays: segment ids, and masks spelt out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks

B, H, T, S = 2, 3, 4, 5


def test_segments_see_themselves():
    query_ids, key_ids = np.asarray([0, 0, 7, -1]), np.asarray([7, 0, -1, -1, 3])
    expected = [[q == k for k in key_ids] for q in query_ids]
    np.testing.assert_array_equal(
        masks.segments(query_ids, key_ids).array(T, S), expected
    )


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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, jnp.bfloat16])
def test_float_array_is_refused_and_pointed_to_bias(dtype):
    for array in (np.ones([T, S], dtype), jnp.ones([T, S], dtype)):
        with pytest.raises(ValueError, match=r"got .*float.*; .* goes in bias="):
            masks.dense(array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full([T, S], 2), r"0/1 integers, got other integers.*masks.padding"),
        (np.full([T, S], -1), r"0/1 integers, got other integers"),
        (np.ones([S], bool), r"got shape \(5,\); lengths become a mask by .*padding"),
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


def test_keys_by_example_are_refused_also_where_batch_equals_queries():
    mask = masks.dense(np.ones([T, S], bool))
    with pytest.raises(ValueError, match=rf"got shape \({T}, {S}\)"):
        mask.check((T,), H, T, S)


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


def test_dense_mask_made_of_a_traced_array():
    array = np.tri(T, S, dtype=np.int32)
    traced = jax.jit(lambda a: masks.dense(a).array(T, S))
    np.testing.assert_array_equal(traced(array), array == 1)
