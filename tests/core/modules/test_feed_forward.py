"""`FeedForward`; models/test_formula.py has its numbers."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import modules

B, T, D, F = 2, 3, 7, 11

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def _model(*args, **kwargs):
    def forward(x, **call):
        return modules.FeedForward(*args, name="feed_forward", **kwargs)(x, **call)

    return hk.transform(forward)


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
def test_weights_come_from_the_initializer(normal):
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
