"""The schedule by hand, clipping, and what decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mha_haiku import models
from mha_haiku.core import checks
from mha_haiku.training import optimizers


def _config(**fields):
    config = {
        "learning_rate": 0.8,
        "warmup_steps": 4,
        "final_learning_rate_fraction": 0.25,
        "weight_decay": 0.1,
        "name": "adamw",
        "momentum": 0.9,
        "b1": 0.9,
        "b2": 0.99,
        "clip_norm": 1.0,
        "frozen": "",
    }
    return optimizers.OptimizerConfig(**config | fields)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0), (1, 0.2), (4, 0.8), (8, 0.5), (12, 0.2), (50, 0.2)]
)
def test_schedule_rises_then_falls_along_a_cosine(step, rate):
    schedule = optimizers.schedule(_config(), steps=13)
    np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    ("steps", "warmup_steps"),
    [(1, 0), (2, 0), (2, 1), (10, 0), (10, 8), (10, 9), (1, 1), (4, 4), (5, 400)],
)
def test_the_last_step_has_the_final_rate(steps, warmup_steps, fraction):
    config = _config(warmup_steps=warmup_steps, final_learning_rate_fraction=fraction)
    schedule = optimizers.schedule(config, steps=steps)
    rates = [float(schedule(step)) for step in range(steps)]
    np.testing.assert_allclose(rates[-1], 0.8 * fraction, rtol=1e-6)
    warmup_steps = min(warmup_steps, steps - 1)
    falling = rates[warmup_steps:]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == (len(falling) if fraction < 1 else 1)
    rise = [0.8 * step / max(warmup_steps, 1) for step in range(warmup_steps)]
    np.testing.assert_allclose(rates[:warmup_steps], rise, rtol=1e-6)


def _update(config, gradient, params):
    transformation = optimizers.make(config, steps=12)
    state = transformation.init(params)
    return transformation.update(gradient, state, params)


@pytest.mark.slow
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


PARAMS = {
    "embedding": {"embeddings": jnp.full((3, 2), 2.0)},
    "encoder/layer_1/linear": {"w": jnp.full((2, 2), 3.0), "b": jnp.full(2, 3.0)},
    "encoder/layer_10/linear": {"w": jnp.full((2, 2), 4.0)},
    "logits": {"w": jnp.full((2, 3), 5.0)},
}


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        ("embedding", ["embedding"]),
        ("encoder/layer_1", ["encoder/layer_1/linear"]),
        (" encoder/ ,logits", [*list(PARAMS)[1:]]),
        ("encoder,encoder/layer_1", [*list(PARAMS)[1:3]]),
    ],
)
def test_frozen_modules_go_by_whole_parts_of_their_names(names, modules):
    frozen = optimizers.are_frozen(_config(frozen=names), PARAMS)
    assert jax.tree.structure(frozen) == jax.tree.structure(PARAMS)
    assert [module for module, own in frozen.items() if all(own.values())] == modules


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("embeding", "must name modules .* got 'embeding'"),
        ("encoder/layer_2", "got 'encoder/layer_2'.*\nIt has embedding, encoder/layer"),
        ("embedding,", "must name modules of the model, got ''"),
        ("embedding,encoder,logits", "must leave parameters to train"),
    ],
)
def test_frozen_names_of_nothing_or_everything_are_refused(names, message):
    with pytest.raises(checks.ConfigError, match=message) as refusal:
        optimizers.are_frozen(_config(frozen=names), PARAMS)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.mark.slow
def test_frozen_parameters_stay_and_the_others_learn_as_if_alone():
    options = {"warmup_steps": 0, "clip_norm": 0.5}
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    frozen = _config(frozen="embedding,encoder", **options)
    update, state = _update(frozen, gradient, PARAMS)
    own, own_state = _update(_config(**options), gradient["logits"], PARAMS["logits"])
    for module, leaves in update.items():
        for name, x in leaves.items():
            expected = own[name] if module == "logits" else np.zeros(x.shape)
            np.testing.assert_array_equal(x, expected)
    # No moments of what is frozen.
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(own_state))


def test_gradient_below_the_first_trained_layer_is_not_computed():
    def apply(params, x):
        for i in range(4):
            x = jnp.tanh(x @ params[f"encoder/layer_{i}"]["w"])
        return (x @ params["logits"]["w"]).sum()

    weights = {f"encoder/layer_{i}": {"w": jnp.full((8, 8), 0.1)} for i in range(4)}
    params = {**weights, "logits": {"w": jnp.full((8, 2), 0.5)}}
    x = jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)

    def gradient_of(frozen):
        model = models.Model(None, apply)
        model = optimizers.without_frozen(model, _config(frozen=frozen))
        compiled = jax.jit(jax.grad(model.apply)).lower(params, x).compile()
        return compiled(params, x), compiled.cost_analysis()["flops"]

    (whole, all_operations), (part, operations) = map(gradient_of, ("", "encoder"))
    np.testing.assert_allclose(part["logits"]["w"], whole["logits"]["w"], rtol=1e-6)
    assert not any(part[module]["w"].any() for module in weights)
    assert all(whole[module]["w"].any() for module in weights)
    # Forward passes of four layers against those and two backward products of each.
    assert operations < 0.5 * all_operations


_PARAMS = {
    "embedding": {"embeddings": np.linspace(-1, 1, 12).reshape(4, 3)},
    "encoder/layer_0/linear": {
        "w": np.linspace(0, 2, 6).reshape(3, 2),
        "b": np.ones(2),
    },
}


def _steps(transformation, params, count=3):
    def step(carry, i):
        params, state = carry
        gradient = jax.tree.map(lambda x: jnp.cos(3 * x + i), params)
        update, state = transformation.update(gradient, state, params)
        return (jax.tree.map(jnp.add, params, update), state), None

    def run(params):
        start = params, transformation.init(params)
        return jax.lax.scan(step, start, jnp.arange(count))[0][0]

    return jax.jit(run)(params)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_a_step_of_sgd_is_that_of_optax(momentum):
    params = jax.tree.map(jnp.float32, _PARAMS)
    config = _config(name="sgd", momentum=momentum, weight_decay=0.0, clip_norm=None)
    schedule = optimizers.schedule(config, steps=12)
    wanted = optax.sgd(schedule, momentum=momentum or None)
    own = optimizers.make(config, steps=12)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(assert_close, _steps(own, params), _steps(wanted, params))
    # By hand: the first step, at the full rate, of weights that decay.
    config = _config(name="sgd", warmup_steps=0, clip_norm=None, momentum=momentum)
    ones = jax.tree.map(jnp.ones_like, params)
    update, _ = _update(config, ones, params)
    linear = "encoder/layer_0/linear"
    assert_close(update[linear]["w"], -0.8 * (1 + 0.1 * params[linear]["w"]))
    assert_close(update[linear]["b"], [-0.8, -0.8])
