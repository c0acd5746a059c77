"""`FeedForward` against NumPy."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import modules
from tests import oracles

B, T, D, F = 2, 3, 7, 11

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def _model(*args, **kwargs):
    def forward(x, **call):
        return modules.FeedForward(*args, name="feed_forward", **kwargs)(x, **call)

    return hk.transform(forward)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "oracle"),
    [
        (functools.partial(jax.nn.gelu, approximate=False), "gelu"),
        (functools.partial(jax.nn.gelu, approximate=True), "gelu_tanh"),
        (jax.nn.relu, "relu"),
    ],
    ids=["gelu", "gelu_tanh", "relu"],
)
def test_two_linear_maps_with_an_activation_between(
    activation, oracle, with_bias, normal, random_parameters
):
    x = normal(B, T, D)
    model = _model(F, activation=activation, with_bias=with_bias)
    params = random_parameters(model, x)
    own = oracles.nested(params, "feed_forward")
    hidden = oracles.linear(own["hidden"], 3 * x)
    hidden = (
        np.maximum(hidden, 0) if oracle == "relu" else getattr(oracles, oracle)(hidden)
    )
    found = model.apply(params, None, 3 * x)
    assert_close(found, oracles.linear(own["output"], hidden))


def test_exact_gelu_is_not_the_tanh_approximation():
    # The two oracles differ by more than the tests above forgive.
    x = np.array([-1.0, 1.0])
    assert np.abs(oracles.gelu(x) - oracles.gelu_tanh(x)).min() > 1e-4
    assert_close(oracles.gelu(1.0), 0.8413447)


@pytest.mark.parametrize("leading", [(), (B, T)], ids=["none", "two"])
def test_swiglu_multiplies_by_a_gate(leading, normal, random_parameters):
    x = normal(*leading, D)
    model = _model(F, activation=jax.nn.silu, gated=True)
    params = random_parameters(model, x)
    own = oracles.nested(params, "feed_forward")
    gate = oracles.silu(oracles.linear(own["gate"], x))
    hidden = oracles.linear(own["hidden"], x) * gate
    assert_close(model.apply(params, None, x), oracles.linear(own["output"], hidden))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_parameter_names_and_shapes(gated, with_bias, normal):
    model = _model(F, gated=gated, with_bias=with_bias)
    params = jax.eval_shape(model.init, jax.random.key(0), normal(B, T, D))
    sizes = {"hidden": (D, F), "output": (F, D)} | ({"gate": (D, F)} if gated else {})
    wanted = {
        f"feed_forward/{name}": {"w": size} | ({"b": size[1:]} if with_bias else {})
        for name, size in sizes.items()
    }
    assert jax.tree.map(lambda leaf: leaf.shape, params) == wanted


def test_dropout_of_hidden_units_keeps_the_mean(normal, random_parameters):
    x = np.abs(normal(B, T, 64)) + 1
    model = _model(64, activation=jax.nn.relu, with_bias=False)
    params = random_parameters(model, x)
    # The output is then the hidden units, which are the inputs.
    params = jax.tree.map(lambda leaf: np.eye(64, dtype=np.float32), params)
    found = model.apply(params, jax.random.key(0), x, dropout_rate=0.75)
    kept = np.asarray(found != 0)
    assert_close(found, np.where(kept, 4 * x, 0))
    assert 0.15 < kept.mean() < 0.35
    np.testing.assert_array_equal(model.apply(params, None, x), x)
    with pytest.raises(ValueError, match="PRNGKey"):
        model.apply(params, None, x, dropout_rate=0.75)


@pytest.mark.slow
def test_weights_come_from_the_initialiser(normal):
    model = _model(F, w_init=hk.initializers.Constant(2.0))
    params = model.init(jax.random.key(0), normal(T, D))
    assert all(
        (leaf["w"] == 2).all() and (leaf["b"] == 0).all() for leaf in params.values()
    )


@pytest.mark.parametrize("hidden_size", [0, 2.5])
def test_a_hidden_size_that_is_no_positive_integer_is_refused(hidden_size, normal):
    with pytest.raises(
        ValueError, match="hidden_size must be an integer of at least 1"
    ):
        _model(hidden_size).init(jax.random.key(0), normal(T, D))
