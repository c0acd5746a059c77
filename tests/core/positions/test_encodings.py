"""Sinusoidal and rotary encodings, against float64 NumPy and hand-computed numbers.

B batch, T positions, H heads, K size per head, D width.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import positions

B, T, H, K, D = 2, 4, 3, 6, 10


@pytest.mark.slow
def test_sinusoidal_features_are_sines_and_cosines_of_one_angle():
    index = np.asarray([[0, 1, 5], [200, 63, 7]])
    angles = index[..., None] / 10_000 ** (np.arange(0, D, 2) / D)
    found = positions.sinusoidal(index, D)
    assert found.shape == (2, 3, D) and found.dtype == jnp.float32
    np.testing.assert_allclose(found[..., 0::2], np.sin(angles), atol=2e-5)
    np.testing.assert_allclose(found[..., 1::2], np.cos(angles), atol=2e-5)


@pytest.mark.slow
def test_sinusoidal_written_by_hand():
    expected = [[0, 1, 0, 1], [0.841471, 0.540302, 0.0099998, 0.99995]]
    found = positions.sinusoidal(np.asarray([0, 1]), 4)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    slower = positions.sinusoidal(np.asarray([1]), 4, max_period=4.0)
    np.testing.assert_allclose(slower[0, 2:], [math.sin(0.5), math.cos(0.5)], rtol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 5, -2])
def test_sinusoidal_width_must_be_even(size):
    with pytest.raises(ValueError, match=f"size must be even .* got {size}"):
        positions.sinusoidal(np.arange(3), size)


def turned(x, index, max_period=10_000.0):
    """Returns x with feature pairs (i, i + K/2) turned as complex numbers, float64."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    speeds = max_period ** (-np.arange(half) / half)
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * index[..., None, None] * speeds)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(T, H, K), (B, T, H, K), (5, B, T, H, K)])
def test_rotary_turns_each_pair_of_features(dtype, shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    index = np.asarray([0, 3, 40, 1])
    found = positions.rotary(x, index)
    assert found.dtype == dtype and found.shape == shape
    tolerance = {jnp.float32: 5e-6, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}[dtype]
    np.testing.assert_allclose(
        np.asarray(found, np.float64), turned(x, index), atol=tolerance
    )


def test_rotary_positions_may_differ_between_examples():
    x = np.random.default_rng(0).normal(size=[B, T, H, K]).astype(np.float32)
    index = np.asarray([[0, 1, 2, 3], [9, 8, 7, 5]])
    np.testing.assert_allclose(
        positions.rotary(x, index, max_period=50.0), turned(x, index, 50.0), atol=5e-6
    )


def test_rotary_turns_by_given_frequencies():
    x = np.random.default_rng(0).normal(size=[B, T, H, K]).astype(np.float32)
    pairs = 50.0 ** (-np.arange(0, K, 2) / K)
    np.testing.assert_array_equal(
        positions.rotary(x, np.arange(T), frequencies=list(pairs)),
        positions.rotary(x, np.arange(T), max_period=50.0),
    )
    # A pair of frequency 0 does not turn, a quarter turn is made by hand.
    turns = [np.pi / 2] + [0.0] * (K // 2 - 1)
    found = positions.rotary(x, np.arange(T), frequencies=turns)
    wanted = x.copy()
    wanted[:, 1, :, 0], wanted[:, 1, :, K // 2] = -x[:, 1, :, K // 2], x[:, 1, :, 0]
    np.testing.assert_allclose(found[:, :2], wanted[:, :2], atol=1e-6)
    with pytest.raises(ValueError, match=rf"K / 2 = {K // 2} pairs .*shape \(1,\)"):
        positions.rotary(x, np.arange(T), frequencies=[1.0])


@pytest.mark.slow
def test_rotary_is_float64_for_float64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=[T, H, K])
        found = positions.rotary(jnp.asarray(x), np.arange(T) + 1000)
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, turned(x, np.arange(T) + 1000), atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "index", "message"),
    [
        ((T, H, 5), (T,), "even key size K, got 5"),
        ((T, H, K), (T + 1,), r"positions must be .*\(4,\) here.*got shape \(5,\)"),
        ((T, H, K), (B, T), r"positions must be .*\(4,\) here.*got shape \(2, 4\)"),
        ((B, T, H, K), (3, T), r"\(2, 4\) here.*got shape \(3, 4\)"),
    ],
)
def test_rotary_refuses_what_does_not_fit(shape, index, message):
    with pytest.raises(ValueError, match=message):
        positions.rotary(jnp.ones(shape), np.ones(index, int))
