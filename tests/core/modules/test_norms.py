"""`LayerNorm` and `RMSNorm` against NumPy and against Haiku's."""

import functools

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import modules
from tests import oracles

B, T, D = 2, 3, 7
EPSILON = 0.01
OURS = {
    "layer_norm": functools.partial(modules.LayerNorm, EPSILON),
    "rms_norm": functools.partial(modules.RMSNorm, EPSILON),
}
THEIRS = {
    "layer_norm": functools.partial(hk.LayerNorm, -1, True, True, EPSILON),
    "rms_norm": functools.partial(hk.RMSNorm, -1, EPSILON),
}

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
assert_trees_close = functools.partial(
    chex.assert_trees_all_close, rtol=1e-5, atol=2e-6
)


@pytest.fixture(params=OURS)
def norm(request):
    return request.param


def _transformed(make):
    return hk.transform(lambda x: make(name="norm")(x))


@pytest.mark.slow
def test_parameters_values_and_gradients_are_those_of_haiku(
    norm, normal, random_parameters
):
    x, cotangent = 2 + 3 * normal(B, T, D), normal(B, T, D)
    ours, theirs = _transformed(OURS[norm]), _transformed(THEIRS[norm])
    key = jax.random.key(0)
    chex.assert_trees_all_equal(ours.init(key, x), theirs.init(key, x))
    params = random_parameters(theirs, x)

    def run(model):
        def loss(params, x):
            output = model.apply(params, None, x)
            return (output * cotangent).sum(), output

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    assert_trees_close(run(ours), run(theirs))


def test_gradients_of_a_gradient_and_of_an_example_each(
    norm, normal, random_parameters
):
    x, direction = normal(B, T, D), normal(B, T, D)

    def curvature(model):
        def loss(x):
            return jnp.sin(model.apply(params, None, x)).sum()

        def slope(x):
            return (jax.vmap(jax.grad(loss))(x) * direction).sum()

        return jax.jit(jax.grad(slope))(x)

    params = random_parameters(_transformed(THEIRS[norm]), x)
    assert_close(
        curvature(_transformed(OURS[norm])),
        curvature(_transformed(THEIRS[norm])),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_in_and_out_with_wide_moments(
    norm, dtype, normal, random_parameters
):
    # The squares of these overflow float16.
    x = jnp.asarray(1000 + 300 * normal(B, T, D), dtype)
    model = _transformed(OURS[norm])
    params = random_parameters(model, x)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    found = model.apply(params, None, x)
    assert found.dtype == dtype
    own = oracles.nested(params, "norm")
    wanted = getattr(oracles, norm)(np.asarray(x, np.float64), own, epsilon=EPSILON)
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=rounding, atol=rounding
    )


@pytest.mark.slow
def test_equal_features_give_the_offset_and_a_zero_row_no_nan(normal):
    x = np.zeros((T, D), np.float32)
    scale, offset = normal(D), normal(D)
    found = modules.norms.layer_norm(x + 5, scale, offset, epsilon=1e-5)
    assert_close(found, np.broadcast_to(offset, (T, D)))

    def loss(x):
        return modules.norms.rms_norm(x, scale, epsilon=1e-5).sum()

    value, gradient = jax.value_and_grad(loss)(x)
    assert value == 0
    assert np.isfinite(gradient).all()
