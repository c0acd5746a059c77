"""Dropout on the weights of attention; the map stays clean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend

B, T, S, H, G, K = 2, 3, 5, 4, 2, 6
RATE = 0.3


@pytest.fixture(scope="module")
def with_dropout(arrays):
    """Returns `run(key, rate)`: the weights after dropout, and the map's own."""
    # Values that are unit vectors make the output the weights themselves.
    query, key, _ = arrays((B,), T, S, H, G, K)
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, G, S))
    mask = masks.padding(np.asarray([5, 3]))

    def run(rng, rate=RATE):
        values, found = attend(query, key, value, mask=mask, dropout_rate=rate, rng=rng)
        return jnp.moveaxis(values, -2, -3), found.weights()

    return jax.jit(run, static_argnames="rate")


def test_map_stays_the_clean_one(with_dropout):
    _, expected = with_dropout(None, 0.0)
    dropped, weights = with_dropout(jax.random.key(0))
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert not np.allclose(dropped, weights)


def test_weight_is_either_dropped_or_grows(with_dropout):
    dropped, weights = with_dropout(jax.random.key(0))
    kept = np.asarray(dropped) != 0
    np.testing.assert_allclose(
        dropped, np.where(kept, weights / (1 - RATE), 0), rtol=1e-5
    )


def test_expectation_is_the_attention_without_dropout(with_dropout):
    keys = jax.random.split(jax.random.key(0), 600)
    dropped = np.stack([with_dropout(key)[0] for key in keys])
    weights = np.asarray(with_dropout(None, 0.0)[0])
    share = (dropped[:, weights > 0] > 0).mean()
    np.testing.assert_allclose(share, 1 - RATE, atol=0.01)
    error = np.abs(dropped.mean(0) - weights).max()
    assert error < 0.15  # over five standard deviations of the mean of one weight


def test_same_key_gives_the_same_and_another_another(with_dropout):
    first, again, other = (with_dropout(jax.random.key(seed))[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_heads_queries_and_examples_are_dropped_apart(with_dropout):
    dropped = np.stack([with_dropout(jax.random.key(seed))[0] for seed in range(3)])
    kept = (dropped != 0)[..., :3]  # the keys that every example sees
    for axis in (1, 2, 3):
        first, second = np.take(kept, 0, axis), np.take(kept, 1, axis)
        assert not np.array_equal(first, second)


def test_rate_of_zero_needs_no_key_and_uses_none(with_dropout):
    without, weights = with_dropout(None, 0.0)
    np.testing.assert_array_equal(with_dropout(jax.random.key(0), 0.0)[0], without)
    np.testing.assert_allclose(without, weights, rtol=1e-6)


def test_gradient_flows_through_the_weights_that_stay(arrays):
    query, key, value = arrays((B,), T, S, H, G, K)

    def total(value):
        rng = jax.random.key(0)
        return attend(query, key, value, dropout_rate=RATE, rng=rng)[0].sum()

    # The output is linear in the values, so the gradient gives it back.
    found, gradient = jax.jit(jax.value_and_grad(total))(value)
    np.testing.assert_allclose(np.vdot(gradient, value), found, rtol=1e-4)
    assert (np.asarray(gradient) > 0).any()
