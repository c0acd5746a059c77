"""Masks as pytrees: through jit, vmap, pmap and scan."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mha_haiku import masks

B, T, S = 2, 3, 5
L = 4  # as many as there are virtual devices


def composed(lengths, ids, array):
    """Returns a mask with static parts, lengths, segment ids and an array."""
    lazy = masks.window(None, 1) | ~masks.where(lambda t, s: t == 2 * s)
    held = masks.padding(lengths) & masks.segments(ids, ids) & masks.dense(array)
    return (lazy & held) | masks.padding(lengths) & masks.dense(array)


@jax.jit
def array_of(mask):
    """Returns the whole mask, compiled as a whole."""
    return mask.array(T, S)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, S + 1, [L, B])
    ids = rng.integers(0, 2, [L, B, S])
    return lengths, ids, rng.random([L, B, S, S]) < 0.5


@pytest.fixture(scope="module")
def expected(arrays):
    return np.stack([array_of(composed(*a)) for a in zip(*arrays, strict=True)])


def test_mask_passes_into_and_out_of_jit(arrays, expected):
    mask = jax.jit(composed)(*(array[0] for array in arrays))
    assert isinstance(mask, masks.Mask)
    np.testing.assert_array_equal(array_of(mask), expected[0])


def test_structure_is_static_and_lengths_are_not():
    array = jax.jit(chex.assert_max_traces(lambda mask: mask.array(T, S), n=1))
    for lengths in ([1, 2], [3, 4]):
        array(masks.padding(jnp.asarray(lengths)) & masks.window(1, 0))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        array(masks.padding(jnp.asarray([1, 2])) & masks.window(2, 0))


@pytest.mark.parametrize("transform", [jax.vmap, jax.pmap])
def test_mask_passes_into_and_out_of_maps_over_an_axis(transform, arrays, expected):
    stacked = jax.jit(transform(composed))(*arrays)
    assert stacked.batch_ndim() == 2
    np.testing.assert_array_equal(array_of(stacked), expected)
    mapped = jax.jit(transform(lambda mask: mask.array(T, S)))(stacked)
    np.testing.assert_array_equal(mapped, expected)


def test_mask_passes_through_scan(arrays, expected):
    stacked = jax.jit(jax.vmap(composed))(*arrays)

    def step(seen, mask):
        return seen | mask.array(T, S), mask

    seen, masks_out = lax.scan(step, jnp.zeros([B, T, S], bool), stacked)
    np.testing.assert_array_equal(seen, expected.any(0))
    np.testing.assert_array_equal(array_of(masks_out), expected)


def test_mask_of_positions_alone_has_no_leaves():
    mask = ~(masks.window(None, 2) | masks.causal()) & masks.window(1, 1)
    assert not jax.tree.leaves(mask)
    assert jax.tree.structure(mask) == jax.tree.structure(jax.tree.map(abs, mask))
