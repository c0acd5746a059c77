"""Features of `MultiHeadAttention` that Haiku's module lacks."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import attention, masks, modules, positions
from mha_haiku.core.modules import HeadTransforms

B, T, S, H, K = 2, 3, 5, 7, 4

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
assert_equal = np.testing.assert_array_equal


def _model(num_heads=H, key_size=K, **kwargs):
    """Our module "mha" as a function that gives its output and its weights."""

    def forward(*args, **call):
        module = modules.MultiHeadAttention(num_heads, key_size, name="mha", **kwargs)
        output, attention_map = module(*args, **call)
        return output, attention_map.weights()

    return hk.transform(forward)


def _initialize(model, *args, **kwargs):
    return jax.eval_shape(
        lambda key: model.init(key, *args, **kwargs), jax.random.key(0)
    )


@pytest.fixture
def inputs(normal):
    """Query, key and value of three widths."""
    return normal(B, T, 8), normal(B, S, 9), normal(B, S, 10)


@pytest.mark.slow
def test_rotary_with_an_offset_gives_the_last_rows_of_the_whole(
    normal, random_parameters
):
    x = normal(B, S, 8)
    model = _model(transforms=HeadTransforms(rotary=positions.rotary))
    params = random_parameters(model, x, x, x)
    offset = S - T
    mask = masks.causal()
    whole = jax.jit(model.apply)(params, None, x, x, x, mask)
    last = x[:, offset:], x, x, mask
    apply = functools.partial(model.apply, first_query=offset)
    found = jax.jit(apply)(params, None, *last)
    assert_close(found[0], whole[0][:, offset:])
    assert_close(found[1], whole[1][:, :, offset:])
    traced = jax.jit(model.apply)(params, None, *last, first_query=offset)
    jax.tree.map(assert_close, traced, found)
    apply = functools.partial(_model().apply, first_query=offset)
    unturned = jax.jit(apply)(params, None, *last)
    assert np.abs(unturned[1] - found[1]).max() > 1e-2


@pytest.mark.slow
def test_a_query_that_sees_nothing_gets_the_bias_alone(inputs, random_parameters):
    model = _model()
    params = random_parameters(model, *inputs)
    mask = masks.padding(np.array([0, 5]))
    output, weights = jax.jit(model.apply)(params, None, *inputs, mask)
    assert (weights[0] == 0).all()
    bias = np.broadcast_to(params["mha/linear"]["b"], (T, H * K))
    assert_equal(output[0], bias)


@pytest.mark.parametrize(
    ("constructor", "call", "message"),
    [
        (
            {"num_key_value_heads": 2},
            {},
            r"num_key_value_heads must divide .* 7, got 2",
        ),
        ({"num_heads": 0}, {}, "num_heads must be an integer of at least 1, got 0"),
        ({}, {"mask": np.ones((B, S), bool)}, r"mask must be .* got shape \(2, 5\)"),
        ({}, {"bias": np.zeros((B, 3, S, 1), np.float32)}, "bias must be"),
        (
            {},
            {"mask": np.ones((B, T, S), bool), "first_query": np.int64(2)},
            r"mask must be .* \(2, 5, 5\) here",
        ),
        (
            {"key_size": 3, "transforms": HeadTransforms(rotary=positions.rotary)},
            {},
            "even key size",
        ),
    ],
)
def test_refusals(constructor, call, message, inputs):
    model = _model(**constructor)
    with pytest.raises(ValueError, match=message):
        _initialize(model, *inputs, **call)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: modules.MultiHeadAttention(2, K), {"dropout_rate": 0.5}),
        (
            lambda: modules.Encoder(1, num_heads=2, key_size=K, hidden_size=5),
            {"is_training": True},
        ),
    ],
)
def test_step_has_no_dropout(make, options, normal):
    x = normal(B, T, 8)
    prompt = attention.Prompt(np.full(B, T), T)
    step = hk.transform(lambda x: make().step(x, x, x, cache=prompt, **options))
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be omitted"):
        step.init(jax.random.key(0), x)
