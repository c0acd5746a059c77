"""The schedule by hand, clipping, and what decays."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.training import optimizers


def _config(**fields):
    config = {
        "learning_rate": 0.8,
        "warmup_steps": 4,
        "final_learning_rate_fraction": 0.25,
        "weight_decay": 0.1,
        "b1": 0.9,
        "b2": 0.99,
        "clip_norm": 1.0,
    }
    return ml_collections.ConfigDict(config | fields)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0), (1, 0.2), (4, 0.8), (8, 0.5), (12, 0.2), (50, 0.2)],
)
def test_schedule_rises_then_falls_along_a_cosine(step, rate):
    schedule = optimizers.schedule(_config(), steps=12)
    np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)


def test_quarter_of_the_cosine():
    schedule = optimizers.schedule(_config(final_learning_rate_fraction=0.0), steps=12)
    np.testing.assert_allclose(schedule(6), 0.8 * (1 + np.sqrt(0.5)) / 2, rtol=1e-6)


def test_warm_up_may_be_nothing_or_everything():
    nothing = optimizers.schedule(_config(warmup_steps=0), steps=12)
    np.testing.assert_allclose(nothing(0), 0.8, rtol=1e-6)
    everything = optimizers.schedule(_config(warmup_steps=4), steps=4)
    np.testing.assert_allclose(everything(3), 0.6, rtol=1e-6)


def _update(config, gradient, params):
    transformation = optimizers.make(config, steps=12)
    state = transformation.init(params)
    return transformation.update(gradient, state, params)


def test_weights_decay_and_biases_and_scales_do_not():
    params = {"linear": {"w": jnp.full((2, 3), 5.0), "b": jnp.full(3, 5.0)}}
    params["norm"] = {"scale": jnp.full(3, 5.0)}
    gradient = jax.tree.map(jnp.zeros_like, params)
    update, _ = _update(_config(warmup_steps=0), gradient, params)
    np.testing.assert_allclose(
        update["linear"]["w"], np.full((2, 3), -0.8 * 0.1 * 5), rtol=1e-6
    )
    np.testing.assert_array_equal(update["linear"]["b"], np.zeros(3))
    np.testing.assert_array_equal(update["norm"]["scale"], np.zeros(3))


@pytest.mark.parametrize(
    ("clip_norm", "factor"), [(1.0, 0.2), (2.5, 0.5), (50.0, 1), (None, 1)]
)
def test_gradient_is_clipped_by_the_norm_of_the_whole_tree(clip_norm, factor):
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    params = jax.tree.map(jnp.zeros_like, gradient)
    _, state = _update(_config(clip_norm=clip_norm), gradient, params)
    (mean,) = (
        x.mu
        for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(x, "mu")
    )
    np.testing.assert_allclose(mean["a"], np.array([0.3, 0]) * factor, rtol=1e-6)
    np.testing.assert_allclose(mean["b"], [[0.4 * factor]], rtol=1e-6)


def test_biases_of_scanned_layers_are_not_decayed_either():
    layer = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    params = {f"encoder/layer_{i}/linear": layer for i in range(4)}
    looped = {**params, "logits": layer}
    wanted = optimizers.is_decayed(looped)
    assert wanted["encoder/layer_1/linear"] == {"w": True, "b": False}
    found = optimizers.is_decayed(models.stacked(looped))
    assert found["encoder/layers/layer_0/linear"] == {"w": True, "b": False}
    assert found["logits"] == wanted["logits"]
