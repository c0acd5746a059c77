"""Masks combined at random, against boolean algebra on arrays."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mha_haiku import masks
from tests import oracles

few = hypothesis.settings(max_examples=25)


def whole(described):
    """Returns the mask's `[B..., H, T, S]`, its axes of size 1 spread out."""
    rows, columns = np.arange(described.num_queries), np.arange(described.num_keys)
    tile = described.mask.aligned(described.batch_ndim).aligned_tile(rows, columns)
    return np.broadcast_to(tile, described.expected.shape)


@pytest.mark.slow
@few
@hypothesis.given(st.data())
def test_composition_is_boolean_algebra(random_masks, data):
    described = data.draw(random_masks)
    np.testing.assert_array_equal(whole(described), described.expected)
    *batch_shape, num_heads, num_queries, num_keys = described.expected.shape
    described.mask.check(tuple(batch_shape), num_heads, num_queries, num_keys)


@pytest.mark.slow
@few
@hypothesis.given(st.data())
def test_array_has_a_head_axis_just_where_heads_may_differ(random_masks, data):
    mask, expected = data.draw(random_masks)
    batch_ndim = mask.batch_ndim()
    # A mask by itself cannot tell some ranks apart; attention knows the batch axes.
    hypothesis.assume(mask.batch_ranks() is None or batch_ndim == expected.ndim - 3)
    array = mask.array(*expected.shape[-2:])
    if not mask.aligned(batch_ndim).has_heads():
        array = np.expand_dims(array, -3)
    assert array.ndim == batch_ndim + 3
    assert array.shape[-2:] == expected.shape[-2:]
    np.testing.assert_array_equal(np.broadcast_to(array, expected.shape), expected)


@pytest.mark.slow
@few
@hypothesis.given(st.data())
def test_tile_is_a_rectangle_of_the_array(random_masks, data):
    mask, expected = data.draw(random_masks)
    hypothesis.assume(
        mask.batch_ranks() is None or mask.batch_ndim() == expected.ndim - 3
    )
    num_queries, num_keys = expected.shape[-2:]
    array = np.asarray(mask.array(num_queries, num_keys))
    rows = np.asarray([num_queries - 1, 0, 0])
    columns = np.asarray([0, num_keys - 1, 1])
    expected = array[..., rows[:, None], columns]
    form = data.draw(st.sampled_from(["arrays", "traceable arrays", "slices"]))
    if form == "traceable arrays":
        rows, columns = jnp.asarray(rows), jnp.asarray(columns)
    if form == "slices":
        rows, columns = slice(0, num_queries, 2), slice(1, num_keys)
        expected = array[..., ::2, 1:]
    np.testing.assert_array_equal(mask.tile(rows, columns), expected)


@pytest.mark.slow
@few
@hypothesis.given(st.data())
def test_key_range_holds_every_key_that_is_seen(random_masks, data):
    mask, expected = data.draw(random_masks)
    num_queries, num_keys = expected.shape[-2:]
    first = data.draw(st.integers(0, num_queries - 1))
    last = data.draw(st.integers(first + 1, num_queries))
    start, stop = map(int, mask.key_range((first, last), (0, num_keys)))
    assert 0 <= start <= stop <= num_keys
    seen = expected[..., first:last, :]
    assert not seen[..., :start].any()
    assert not seen[..., stop:].any()


@pytest.mark.slow
@few
@hypothesis.given(st.data())
def test_unseen_keys_and_fully_masked_queries_are_exact(random_masks, data):
    described = data.draw(random_masks)
    mask, expected = described
    mask = mask.aligned(described.batch_ndim)
    sizes = described.num_queries, described.num_keys
    for axis, flags in (
        (-2, mask.unseen_keys(*sizes)),
        (-1, mask.fully_masked(*sizes)),
    ):
        flags = False if flags is None else flags
        wanted = ~expected.any(axis)
        np.testing.assert_array_equal(np.broadcast_to(flags, wanted.shape), wanted)
    later = mask.unseen_keys(sizes[0], sizes[1] - 1, 0, 1)
    wanted = ~expected[..., 1:].any(-2)
    later = np.broadcast_to(False if later is None else later, wanted.shape)
    np.testing.assert_array_equal(later, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        masks.where(lambda t, s: (t - s) % 1000 == 0) & masks.causal(),
        masks.padding(np.asarray([3, 0])) & masks.causal(),
        masks.padding(np.asarray([3, 2]), np.asarray([1500, 2500])),
    ],
)
def test_sweeps_over_many_queries_leave_none_out(mask):
    num_queries, num_keys = 2500, 4  # two whole blocks of queries and a part of one
    array = np.asarray(mask.array(num_queries, num_keys))
    unseen, blind = oracles.unseen_and_masked(mask, num_queries, num_keys)
    np.testing.assert_array_equal(unseen, ~array.any(-2))
    np.testing.assert_array_equal(blind, ~array.any(-1))


def test_sweep_finds_the_one_query_of_the_last_block_that_sees():
    array = np.zeros([2500, 3], bool)
    array[2499, 1] = True
    mask = masks.dense(array)
    unseen, blind = oracles.unseen_and_masked(mask, 2500, 3)
    np.testing.assert_array_equal(unseen, [True, False, True])
    np.testing.assert_array_equal(np.flatnonzero(~blind), [2499])


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(),
        masks.causal(),
        masks.where(lambda t, s: t == s),
        masks.padding(np.asarray([0, 0])),
        ~masks.padding(np.asarray([0, 0])),
    ],
)
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_without_queries_no_key_is_seen_and_without_keys_no_query_sees(mask, sizes):
    array = mask.array(*sizes)
    assert array.shape[-2:] == sizes
    unseen, blind = oracles.unseen_and_masked(mask, *sizes)
    np.testing.assert_array_equal(unseen, ~array.any(-2))
    np.testing.assert_array_equal(blind, ~array.any(-1))


def test_range_of_known_keys_stays_known_where_rows_are_traced():
    mask = masks.window(1, 0) & masks.padding(np.asarray([4, 2]))
    start, stop = jax.jit(lambda t: mask.key_range((t, t + 2), (0, 9)))(3)
    assert (int(start), int(stop)) == (2, 4)


@pytest.mark.parametrize(
    "other", [True, 1, None, np.ones([2, 3], bool), jnp.ones([2, 3], bool)]
)
def test_masks_combine_with_masks_only(other):
    for combine in (lambda a, b: a & b, lambda a, b: a | b):
        with pytest.raises(TypeError, match=r"combines with masks only.*masks.dense"):
            combine(masks.causal(), other)
        with pytest.raises(TypeError):
            combine(other, masks.causal())


def test_python_words_between_masks_are_refused():
    with pytest.raises(TypeError, match="combine masks with & | ~"):
        masks.causal() and masks.full()
    with pytest.raises(TypeError, match="combine masks with & | ~"):
        not masks.causal()


def test_parts_that_disagree_on_batch_axes_are_refused():
    mask = masks.padding(np.asarray([1, 2])) & masks.segments(np.asarray([0, 1]))
    with pytest.raises(ValueError, match="disagree on the number of batch axes"):
        mask.array(2, 2)
    with pytest.raises(ValueError, match=r"query_ids .*got shape \(2,\)"):
        mask.check((2,), 3, 2, 2)


@pytest.mark.parametrize("index", [slice(None), slice(2, None), slice(0, -1)])
def test_tile_of_a_mask_needs_slices_with_ends(index):
    with pytest.raises(ValueError, match="a slice with ends"):
        masks.causal().tile(index, slice(0, 3))


def test_full_mask_takes_nothing_from_what_is_known_of_another():
    causal = masks.causal()
    for mask in (causal & masks.full(), masks.full() & causal):
        # None: known without looking at the pairs.
        assert mask.unseen_keys(5, 5) is None
        assert mask.fully_masked(5, 5) is None
