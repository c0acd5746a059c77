"""Forward mode is refused with the way out; second derivatives of attention are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend
from tests import everyday

B, T, H, K = 2, 3, 1, 2


def values(query, implementation):
    key = jnp.linspace(-1, 2, query.size).reshape(query.shape)
    found, _ = attend(
        query, key, key, mask=masks.causal(), implementation=implementation
    )
    return (found**2).sum()


def entropy(query, implementation):
    key = jnp.linspace(-1, 2, query.size).reshape(query.shape)
    _, found = attend(query, key, key, implementation=implementation)
    return found.statistics().entropy.sum()


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacfwd of jit": lambda f, x: jax.jacfwd(jax.jit(f))(x),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(lambda y: f(y[None])), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
}


@pytest.mark.parametrize(
    ("function", "implementation", "how"),
    [(values, name, how) for name in ("dense", "blockwise") for how in FORWARD]
    + everyday.some([(entropy, "formula", how) for how in FORWARD], 3),
)
def test_forward_mode_is_refused_with_the_way_out(function, implementation, how):
    query = jnp.ones((B, T, H, K))
    with pytest.raises(ValueError, match="implementation='formula'"):
        FORWARD[how](lambda x: function(x, implementation), query)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_second_derivatives_of_attention_equal_those_of_the_formula(implementation):
    query = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, H, K)), jnp.float32)
    found, expected = (
        jax.jit(jax.hessian(lambda x, name=name: values(x, name)))(query)
        for name in (implementation, "formula")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
