"""Masks as pytrees; test_attention_map.py takes them through transformations."""

import chex
import jax
import jax.numpy as jnp
import pytest

from mha_haiku import masks

T, S = 3, 5


def test_structure_is_static_and_lengths_are_not():
    array = jax.jit(chex.assert_max_traces(lambda mask: mask.array(T, S), n=1))
    for lengths in ([1, 2], [3, 4]):
        array(masks.padding(jnp.asarray(lengths)) & masks.window(1, 0))
    with pytest.raises(AssertionError, match="traced > 1 times"):
        array(masks.padding(jnp.asarray([1, 2])) & masks.window(2, 0))


def test_mask_of_positions_alone_has_no_leaves():
    mask = ~(masks.window(None, 2) | masks.causal()) & masks.window(1, 1)
    assert not jax.tree.leaves(mask)
    assert jax.tree.structure(mask) == jax.tree.structure(jax.tree.map(abs, mask))
