"""Encoder layers and their stack; models/test_formula.py has their numbers."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import masks, modules

B, T, H, K, F, L = 2, 5, 7, 4, 11, 3
D = H * K

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-6)
assert_equal = np.testing.assert_array_equal


def _layer(i, num_heads=H, **kwargs):
    return modules.EncoderLayer(
        lambda: modules.MultiHeadAttention(
            num_heads, K, model_size=D, value_size=6, name="attention"
        ),
        lambda: modules.FeedForward(F, activation=jax.nn.relu, name="feed_forward"),
        name=f"layer_{i}",
        **kwargs,
    )


def _encoder(make_layer=_layer, num_layers=L, **kwargs):
    """An encoder as a function that gives its output and the weights of each layer."""

    def forward(*args, is_training=False, **call):
        encoder = modules.Encoder(num_layers, make_layer, **kwargs)
        output, maps = encoder(*args, is_training=is_training, **call)
        return output, tuple(each.weights() for each in maps)

    return hk.transform(forward)


@pytest.mark.slow
def test_each_layer_may_have_a_mask_of_its_own(normal, random_parameters):
    x = normal(B, T, D)
    own = [masks.causal(), masks.window(1, 0), masks.full()]
    model = _encoder()
    params = random_parameters(model, x)
    _, weights = model.apply(params, None, x, own)
    for mask, found in zip(own, weights, strict=True):
        assert_equal(found[0, 0] > 0, mask.array(T, T))
    with pytest.raises(ValueError, match="mask must be .* L = 3, got 2"):
        jax.eval_shape(model.apply, params, None, x, own[:2])
    scanned = _encoder(stack=modules.scanned)
    with pytest.raises(ValueError, match="mask"):
        jax.eval_shape(scanned.init, jax.random.key(0), x, own)
    alike = [masks.padding(np.array([5, 3]))] * L
    jax.eval_shape(scanned.init, jax.random.key(0), x, alike)


@pytest.mark.slow
def test_sizes_make_the_encoder_that_functions_make(normal, random_parameters):
    x = normal(B, T, D)

    def output(encoder):
        return encoder(x, is_training=False)[0]

    def make_layer(i):
        return modules.EncoderLayer(
            lambda: modules.MultiHeadAttention(H, K, model_size=D, name="attention"),
            lambda: modules.FeedForward(F, name="feed_forward"),
            name=f"layer_{i}",
        )

    made = hk.transform(
        lambda: output(modules.Encoder(2, make_layer, make_norm=modules.LayerNorm))
    )
    sized = hk.transform(
        lambda: output(modules.Encoder(num_layers=2, num_heads=H, hidden_size=F))
    )
    params = random_parameters(made)
    assert_equal(sized.apply(params, None), made.apply(params, None))
    key = jax.random.key(0)
    shapes = [jax.eval_shape(each.init, key) for each in (made, sized)]
    assert shapes[0] == shapes[1]


def test_a_function_that_makes_a_part_replaces_its_size(normal, random_parameters):
    x = normal(B, T, D)

    def forward(x):
        encoder = modules.Encoder(
            2,
            num_heads=H,
            make_feed_forward=lambda: lambda x, **options: 0 * x,
            make_norm=modules.RMSNorm,
            stack=modules.scanned,
        )
        return encoder(x, is_training=False)[0]

    model = hk.transform(forward)
    params = random_parameters(model, x)
    parts = [f"attention/{name}" for name in ("query", "key", "value", "linear")]
    wanted = {f"encoder/layers/layer_0/{part}" for part in (*parts, "norm_1", "norm_2")}
    assert params.keys() == wanted | {"encoder/norm"}
    assert params["encoder/norm"].keys() == {"scale"}


@pytest.mark.parametrize(
    "module", [lambda: modules.Encoder(1, _layer), lambda: _layer(0)]
)
def test_is_training_has_no_default(module, normal):
    forward = hk.transform(lambda x: module()(x))
    with pytest.raises(TypeError, match="is_training"):
        forward.init(jax.random.key(0), normal(B, T, D))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _layer(0, norm_position="pree"),
            "norm_position .* Did you mean 'pre'",
        ),
        (lambda: _layer(0, dropout_rate=1.0), r"dropout_rate .* in \[0, 1\), got 1.0"),
        (lambda: modules.Encoder(0, _layer), "num_layers must be .* got 0"),
        (lambda: modules.EncoderLayer(hidden_size=1), "num_heads or make_attention"),
        (lambda: modules.EncoderLayer(num_heads=1), "hidden_size or make_feed_forward"),
        (
            lambda: modules.EncoderLayer(lambda: None, num_heads=1, hidden_size=1),
            "num_heads must be omitted where make_attention is given, got 1",
        ),
        (
            lambda: modules.EncoderLayer(num_heads=-1, hidden_size=1),
            "num_heads must be .* got -1",
        ),
        (
            lambda: modules.Encoder(1, _layer, num_heads=2),
            "make_layer must be omitted .* both it and num_heads",
        ),
        (
            lambda: modules.Encoder(1, num_heads=3, hidden_size=1)(
                np.ones((T, 8), np.float32), is_training=False
            ),
            "num_heads must divide the width 8 where key_size is not given, got 3",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        hk.transform(make).init(jax.random.key(0))
