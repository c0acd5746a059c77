"""Second derivatives, and forward mode, which only the formula has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend

B, T, H, K = 2, 3, 1, 2


def values(query, implementation):
    key = jnp.linspace(-1, 2, query.size).reshape(query.shape)
    values, _ = attend(
        query, key, key, mask=masks.causal(), implementation=implementation
    )
    return (values**2).sum()


def entropy(query, implementation):
    key = jnp.linspace(-1, 2, query.size).reshape(query.shape)
    _, attention_map = attend(query, key, key, implementation=implementation)
    if implementation == "formula":
        weights = attention_map.weights()
        return -(weights * jnp.log(weights)).sum(-1).mean(-1).sum()
    return attention_map.statistics().entropy.sum()


@pytest.mark.parametrize("function", [values, entropy])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_forward_mode_of_a_custom_gradient_is_refused(function, jit):
    query = jnp.ones((B, T, H, K))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jit(lambda x: function(x, "dense")), (query,), (query,))


def test_the_formula_has_forward_mode():
    query = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, H, K)), jnp.float32)
    forward, reverse = (
        jacobian(lambda x: values(x, "formula"))(query)
        for jacobian in (jax.jacfwd, jax.jacrev)
    )
    np.testing.assert_allclose(forward, reverse, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function", [values, entropy])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_second_derivatives_equal_those_of_the_formula(function, implementation):
    query = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, H, K)), jnp.float32)
    actual, expected = (
        jax.jit(jax.jacrev(jax.grad(lambda x, name=name: function(x, name))))(query)
        for name in (implementation, "formula")
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
