"""Scores of queries and keys, against pair by pair NumPy and hand-made numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core.attention import scores
from tests import oracles
from tests.core.attention.rated_score import Rated

B, T, S, H, K = 2, 3, 5, 4, 6


@pytest.mark.parametrize(
    ("scale", "soft_cap", "num_key_heads"),
    [(None, None, 4), (0.3, None, 1), (None, 1.5, 2), (2.0, 0.7, 4)],
)
def test_dot_product_with_scale_and_soft_cap(
    scale, soft_cap, num_key_heads, arrays, check
):
    inputs = arrays((B,), T, S, H, num_key_heads, K)
    score = scores.dot_product(scale=scale, soft_cap=soft_cap)

    def stated(query, key, head):
        return oracles.dot_product(query, key, head, scale=scale, soft_cap=soft_cap)

    check(inputs, {"score": score}, {"score": stated})
    if soft_cap:
        assert np.abs(score(*inputs[:2])).max() <= soft_cap


@pytest.mark.slow
def test_scores_written_by_hand():
    query, key = jnp.asarray([[[1.0, 2.0]]]), jnp.asarray([[[3.0, -1.0]], [[0.0, 1.0]]])
    np.testing.assert_allclose(
        scores.dot_product()(query, key), [[[1 / math.sqrt(2), 2 / math.sqrt(2)]]], 1e-6
    )
    np.testing.assert_allclose(
        scores.dot_product(scale=3.0, soft_cap=4.0)(query, key),
        [[[4 * math.tanh(0.75), 4 * math.tanh(1.5)]]],
        1e-6,
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scores_of_halves_are_summed_in_float32(dtype):
    # 1 + 2^-12 K times: in half precision the small part would vanish.
    query = jnp.full([1, 1, 1024], 1, dtype)
    key = jnp.full([1, 1, 1024], 2.0**-12, dtype).at[0, 0, 0].set(256)
    found = scores.dot_product(scale=1)(query, key)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [[[256 + 1023 * 2.0**-12]]], rtol=1e-6)


def test_score_is_a_pytree_whose_scale_is_static():
    assert not jax.tree.leaves(scores.dot_product(scale=2.0, soft_cap=3.0))
    stacked = jax.vmap(lambda rate: Rated(rate).aligned(1))(jnp.ones([7, H]))
    assert stacked.rate.shape == (7, 1, H)
    np.testing.assert_array_equal(stacked.aligned(2).rate, stacked.rate)


@pytest.mark.parametrize("soft_cap", [0, -1.0, math.inf, math.nan])
def test_soft_cap_must_be_positive_and_finite(soft_cap):
    with pytest.raises(ValueError, match="soft_cap must be a finite number above 0"):
        scores.dot_product(soft_cap=soft_cap)


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan])
def test_scale_must_be_finite_and_not_negative(scale):
    with pytest.raises(ValueError, match="scale must be a finite number of at least 0"):
        scores.dot_product(scale=scale)
