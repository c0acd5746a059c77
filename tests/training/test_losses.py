"""Weighted cross-entropy against NumPy, and what must not be felt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.training import losses

B, T, C = 2, 3, 5


def _oracle(logits, targets, weights):
    """The weighted sum of cross-entropies, and its gradient, in float64."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, targets[..., None], -1)[..., 0]
    one_hot = np.eye(logits.shape[-1])[targets]
    gradient = (probabilities - one_hot) * weights[..., None]
    return -(np.log(chosen) * weights).sum(), gradient


def _random(shape):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=shape).astype(np.float32) * 3
    targets = generator.integers(0, shape[-1], shape[:-1]).astype(np.int32)
    weights = generator.uniform(size=shape[:-1]).astype(np.float32)
    return logits, targets, weights


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(B, T, C), (B, T)], ids=["positions", "set"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_sums_and_gradient_equal_those_of_numpy(shape, is_jitted):
    logits, targets, weights = _random(shape)
    correct = logits.argmax(-1) == targets

    def value(logits):
        sums = losses.sums(logits, targets, weights, correct)
        return sums.loss, sums

    value_and_gradient = jax.value_and_grad(value, has_aux=True)
    if is_jitted:
        value_and_gradient = jax.jit(value_and_gradient)
    (_, sums), gradient = value_and_gradient(logits)
    wanted, wanted_gradient = _oracle(logits, targets, weights)
    np.testing.assert_allclose(sums.loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)
    np.testing.assert_allclose(sums.correct, (weights * correct).sum(), rtol=1e-6)
    np.testing.assert_allclose(sums.weight, weights.sum(), rtol=1e-6)


@pytest.mark.slow
def test_equal_logits_cost_the_logarithm_of_the_number_of_classes():
    value = losses.cross_entropy(jnp.full((T, C), 7.0), jnp.arange(T))
    np.testing.assert_allclose(value, np.full(T, np.log(C)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_loss_is_float32_and_huge_logits_are_finite(dtype):
    logits = jnp.array([[3e4, -3e4, 0.0]], dtype)
    value = losses.cross_entropy(logits, jnp.array([1]))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, [6e4], rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_has_no_weight_cannot_be_felt(bad):
    logits, targets, weights = _random((B, T, C))
    weights[0, 1] = 0
    correct = np.ones((B, T), bool)

    def value(logits):
        return losses.sums(logits, targets, weights, correct).loss

    wanted, wanted_gradient = jax.value_and_grad(value)(logits)
    broken = logits.copy()
    broken[0, 1] = bad
    found, gradient = jax.value_and_grad(value)(broken)
    assert found == wanted
    np.testing.assert_array_equal(gradient, wanted_gradient)


@pytest.mark.slow
def test_elements_outside_of_the_set_cannot_be_chosen():
    logits = jnp.array([[1.0, 2.0, -jnp.inf]])
    value, gradient = jax.value_and_grad(
        lambda x: losses.cross_entropy(x, jnp.array([0])).sum()
    )(logits)
    np.testing.assert_allclose(value, np.log(1 + np.e), rtol=1e-6)
    assert gradient[0, 2] == 0 and np.isfinite(gradient).all()
