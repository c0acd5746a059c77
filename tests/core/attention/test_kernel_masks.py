"""Masks in the terms of kernels: what is translated, and that it means the same.

B batch, T queries, S keys.
"""

import jax
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import kernels

B, T, S = 2, 3, 5
LENGTHS, QUERY_LENGTHS = np.asarray([4, 2]), np.asarray([1, 3])
PADDING = masks.padding(LENGTHS, QUERY_LENGTHS)
IDS = np.zeros([B, T], int), np.zeros([B, S], int)

# mask, (left, right, key lengths, query lengths)
TRANSLATIONS = {
    "full": (masks.full(), (None, None, [], [])),
    "causal": (masks.causal(), (None, 0, [], [])),
    "window": (masks.window(2, 1), (2, 1, [], [])),
    "left window": (masks.window(2, None), (2, None, [], [])),
    "padding": (masks.padding(LENGTHS), (None, None, [LENGTHS], [])),
    "query padding": (PADDING, (None, None, [LENGTHS], [QUERY_LENGTHS])),
    "causal padding": (masks.causal() & PADDING, (None, 0, [LENGTHS], [QUERY_LENGTHS])),
    "full & causal": (masks.full() & masks.causal(), (None, 0, [], [])),
    "narrower window": (masks.window(2, 1) & masks.window(1, 3), (1, 1, [], [])),
    "causal window": (masks.window(1, None) & masks.causal(), (1, 0, [], [])),
    "lengths twice": (
        PADDING & (masks.causal() & masks.padding(LENGTHS[::-1])),
        (None, 0, [LENGTHS, LENGTHS[::-1]], [QUERY_LENGTHS]),
    ),
    "one for all": (masks.padding(LENGTHS[1:]), (None, None, [LENGTHS[1:]], [])),
    "no keys": (masks.padding(np.asarray([0, 3])), (None, None, [[0, 3]], [])),
}

NOT_TRANSLATABLE = {
    "union": masks.causal() | masks.padding(LENGTHS),
    "complement": ~masks.causal(),
    "function": masks.where(lambda t, s: t == s),
    "segments": masks.segments(*IDS),
    "dense": masks.dense(np.ones([B, T, S], bool)),
    "a part": masks.causal() & (masks.padding(LENGTHS) & ~masks.window(1, 1)),
}


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_translation(name):
    mask, (left, right, key_lengths, query_lengths) = TRANSLATIONS[name]
    found = kernels.translated(mask.aligned(1))
    assert (found.left, found.right) == (left, right)
    for lengths, wanted in (
        (found.key_lengths, key_lengths),
        (found.query_lengths, query_lengths),
    ):
        assert len(lengths) == len(wanted)
        for array, numbers in zip(lengths, wanted, strict=True):
            np.testing.assert_array_equal(np.ravel(array), numbers)


@pytest.mark.parametrize("name", NOT_TRANSLATABLE)
def test_what_kernels_do_not_know_is_not_translated(name):
    assert kernels.translated(NOT_TRANSLATABLE[name].aligned(1)) is None


def test_translation_needs_shapes_alone():
    mask = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), masks.causal() & PADDING
    )
    found = kernels.translated(mask.aligned(1))
    assert found.right == 0
    assert found.key_lengths[0].shape == (B,)


@pytest.mark.parametrize("num_queries", [T, 2 * S])
@pytest.mark.parametrize("name", TRANSLATIONS)
def test_seen_keys_are_those_that_the_mask_allows(name, num_queries):
    mask = TRANSLATIONS[name][0]

    @jax.jit
    def seen(mask):
        found = kernels.translated(mask.aligned(1))
        found = found.collapsed((B,), num_queries, S)
        return found.seen_keys(num_queries, S)

    start, stop = (np.asarray(x)[..., None] for x in seen(mask))
    keys = np.arange(S)
    allowed = np.broadcast_to((keys >= start) & (keys < stop), [B, num_queries, S])
    np.testing.assert_array_equal(
        allowed, np.broadcast_to(mask.array(num_queries, S), allowed.shape)
    )
    assert (start >= 0).all() and (stop <= S).all()


@pytest.mark.slow
def test_lengths_collapse_to_one_number_per_example_within_the_map():
    lengths = np.asarray([[4], [2]]), np.asarray([[9, 3, 9]], np.int8)
    mask = masks.padding(lengths[0], lengths[1]) & masks.padding(lengths[1])
    found = kernels.translated(mask.aligned(2)).collapsed((2, 3), T, S)
    np.testing.assert_array_equal(found.key_lengths[0], [4, 3, 4, 2, 2, 2])
    np.testing.assert_array_equal(found.query_lengths[0], [3, 3, 3, 3, 3, 3])
    assert found.key_lengths[0].dtype == found.query_lengths[0].dtype == np.int32
