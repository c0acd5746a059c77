"""Forward mode is for the formula alone; second derivatives of attention for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend

B, T, H, K = 2, 3, 1, 2


def values(query, implementation):
    key = jnp.linspace(-1, 2, query.size).reshape(query.shape)
    found, _ = attend(
        query, key, key, mask=masks.causal(), implementation=implementation
    )
    return (found**2).sum()


@pytest.mark.parametrize("how", ["jvp", "jit of jvp"])
def test_forward_mode_is_for_the_formula_alone(how):
    query = jnp.ones((B, T, H, K))

    def slope(implementation):
        run = lambda x: jax.jvp(lambda x: values(x, implementation), (x,), (x,))[1]  # noqa: E731
        return (jax.jit(run) if how == "jit of jvp" else run)(query)

    assert np.isfinite(slope("formula"))
    for name in ("dense", "blockwise"):
        with pytest.raises(TypeError, match="forward-mode"):
            slope(name)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_second_derivatives_of_attention_equal_those_of_the_formula(implementation):
    query = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, H, K)), jnp.float32)
    found, expected = (
        jax.jit(jax.hessian(lambda x, name=name: values(x, name)))(query)
        for name in (implementation, "formula")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
