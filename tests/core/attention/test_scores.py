"""Scores of queries and keys, against pair by pair NumPy and hand-made numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core.attention import additive, scores
from tests import oracles

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


@pytest.mark.parametrize(("num_key_heads", "batch"), [(4, ()), (2, (2,)), (1, (3, 2))])
def test_additive_score(num_key_heads, batch, arrays, check):
    inputs = arrays(batch, T, S, H, num_key_heads, K)
    weight = np.random.default_rng(1).normal(size=[H, K]).astype(np.float32)

    def stated(query, key, head):
        return weight[head] @ np.tanh(query + key)

    check(inputs, {"score": additive(weight)}, {"score": stated})


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
    weight = jnp.asarray([[0.5, -2.0]])
    expected = [0.5 * math.tanh(4) - 2 * math.tanh(1), 0.5 * math.tanh(1)]
    expected[1] -= 2 * math.tanh(3)
    np.testing.assert_allclose(additive(weight)(query, key), [[expected]], 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["dot product", "additive"])
def test_scores_of_halves_are_summed_in_float32(dtype, kind):
    # 1 + 2^-12 K times: in half precision the small part would vanish.
    query = jnp.full([1, 1, 1024], 1, dtype)
    if kind == "dot product":
        key = jnp.full([1, 1, 1024], 2.0**-12, dtype).at[0, 0, 0].set(256)
        score, expected = scores.dot_product(scale=1), 256 + 1023 * 2.0**-12
    else:
        key = jnp.full([1, 1, 1024], 20, dtype)
        weight = jnp.full([1, 1024], 2.0**-12).at[0, 0].set(256)
        score, expected = additive(weight), 256 + 1023 * 2.0**-12
    found = score(query, key)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [[[expected]]], rtol=1e-6)


def test_score_is_a_pytree_whose_scale_is_static():
    assert not jax.tree.leaves(scores.dot_product(scale=2.0, soft_cap=3.0))
    assert len(jax.tree.leaves(additive(jnp.ones([H, K])))) == 1
    stacked = jax.vmap(lambda weight: additive(weight).aligned(1))(jnp.ones([7, H, K]))
    assert stacked.weight.shape == (7, 1, H, K)
    np.testing.assert_array_equal(stacked.aligned(2).weight, stacked.weight)


@pytest.mark.parametrize("soft_cap", [0, -1.0, math.inf, math.nan])
def test_soft_cap_must_be_positive_and_finite(soft_cap):
    with pytest.raises(ValueError, match="soft_cap must be a finite number above 0"):
        scores.dot_product(soft_cap=soft_cap)


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan])
def test_scale_must_be_finite_and_not_negative(scale):
    with pytest.raises(ValueError, match="scale must be a finite number of at least 0"):
        scores.dot_product(scale=scale)


@pytest.mark.parametrize("shape", [(K,), (1, H, K), ()])
def test_additive_weight_must_have_two_axes(shape):
    with pytest.raises(ValueError, match=r"weight must be \[H, K\], got shape"):
        additive(jnp.ones(shape))
