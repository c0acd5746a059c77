"""Encoder layers and their stack, against formulas written out."""

import contextlib
import functools

import chex
import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import masks, modules, positions
from tests import oracles

B, T, H, K, F, L = 2, 5, 7, 4, 11, 3
D = H * K

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-6)
assert_trees_close = functools.partial(
    chex.assert_trees_all_close, rtol=1e-5, atol=5e-6
)
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


class _Recorder:
    """Stands for a part of a layer: notes how it was called, and returns its input."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, *args, **kwargs):
        self.calls.append((args, kwargs))
        return (x, "map") if args else x


def test_encoder_applies_its_layers_in_order_then_the_norm(normal, random_parameters):
    x = normal(B, T, D)
    mask = masks.padding(np.array([5, 3]))
    bias = positions.alibi(H)
    model = _encoder(make_norm=modules.LayerNorm)
    params = random_parameters(model, x)
    output, weights = jax.jit(model.apply)(params, None, x, mask, bias=bias)
    assert [each.shape for each in weights] == [(B, H, T, T)] * L

    def one_layer(x, mask, bias):
        output, attention_map = _layer(0)(x, mask, bias=bias, is_training=False)
        return output, attention_map.weights()

    run = jax.jit(hk.transform(one_layer).apply)
    for i in range(L):
        prefix = f"encoder/layer_{i}"
        own = {
            k.replace(prefix, "layer_0"): v for k, v in params.items() if prefix in k
        }
        x, wanted = run(own, None, x, mask, bias)
        assert_close(weights[i], wanted)
    assert_close(output, oracles.layer_norm(np.asarray(x), params["encoder/norm"]))


def test_parameter_names(normal):
    model = _encoder(num_layers=2, make_norm=modules.RMSNorm)
    params = jax.eval_shape(model.init, jax.random.key(0), normal(B, T, D))
    parts = [f"attention/{name}" for name in ("query", "key", "value", "linear")]
    parts += ["feed_forward/hidden", "feed_forward/output", "norm_1", "norm_2"]
    wanted = {f"encoder/layer_{i}/{part}" for i in range(2) for part in parts}
    assert params.keys() == wanted | {"encoder/norm"}


def test_each_layer_may_have_a_mask_of_its_own(normal, random_parameters):
    x = normal(B, T, D)
    own = [masks.causal(), masks.window(1, 0), masks.full()]
    model = _encoder()
    params = random_parameters(model, x)
    _, weights = model.apply(params, None, x, own)
    for mask, found in zip(own, weights, strict=True):
        assert_equal(found[0, 0] > 0, mask.array(T, T))
    with pytest.raises(ValueError, match="mask must be .* L = 3 of them, got 2"):
        jax.eval_shape(model.apply, params, None, x, own[:2])
    scanned = _encoder(stack=modules.scanned)
    with pytest.raises(ValueError, match="scanned layers must be alike, got something"):
        jax.eval_shape(scanned.init, jax.random.key(0), x, own)
    alike = [masks.padding(np.array([5, 3]))] * L
    jax.eval_shape(scanned.init, jax.random.key(0), x, alike)


def test_parallel_parts_read_the_same_and_are_added(normal, random_parameters):
    x = normal(B, T, D)

    def run(params=None, **options):
        """Runs a layer; without attention or feed-forward part it is the other's."""
        options = {"num_heads": H, "key_size": K, "hidden_size": F} | options
        model = hk.transform(
            lambda x: modules.EncoderLayer(**options, name="layer")(
                x, is_training=False
            )[0]
        )
        params = params or random_parameters(model, x)
        return params, np.asarray(jax.jit(model.apply)(params, None, x))

    params, found = run(parallel=True)
    _, attended = run(params, hidden_size=0)
    _, fed_forward = run(params, num_heads=0)
    assert_close(found, x + (attended - x) + (fed_forward - x))
    # Of one part, parallel and sequential are the same.
    assert_equal(run(params, num_heads=0, parallel=True)[1], fed_forward)


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

    for made, sized in (
        (
            lambda: modules.Encoder(2, make_layer, make_norm=modules.LayerNorm),
            lambda: modules.Encoder(num_layers=2, num_heads=H, hidden_size=F),
        ),
        (
            lambda: modules.Encoder(2, lambda i: make_post(i)),
            lambda: modules.Encoder(
                2, num_heads=H, hidden_size=F, norm_position="post"
            ),
        ),
    ):

        def make_post(i):
            return modules.EncoderLayer(
                num_heads=H,
                key_size=K,
                hidden_size=F,
                norm_position="post",
                name=f"layer_{i}",
            )

        made = hk.transform(lambda made=made: output(made()))
        sized = hk.transform(lambda sized=sized: output(sized()))
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


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_a_part_may_stand_alone_without_residual_or_norm(
    part, norm_position, normal, random_parameters
):
    x = normal(B, T, D)
    is_attention = part == "attention"

    def forward(x):
        layer = modules.EncoderLayer(
            num_heads=H if is_attention else 0,
            hidden_size=0 if is_attention else F,
            make_norm=modules.no_norm,
            norm_position=norm_position,
            attention_residual=False,
            feed_forward_residual=False,
            name="layer",
        )
        output, attention_map = layer(x, is_training=False)
        return output, attention_map.weights()

    model = hk.transform(forward)
    params = random_parameters(model, x)
    own = oracles.nested(params, "layer")
    assert own.keys() == {part}
    output, weights = model.apply(params, None, x)
    if is_attention:
        ones = np.ones((B, 1, T))
        wanted, _ = oracles.haiku_style(
            own[part], x, x, x, ones, d_model=D, num_heads=H
        )
    else:
        hidden = oracles.gelu(oracles.linear(own[part]["hidden"], x))
        wanted = oracles.linear(own[part]["output"], hidden)
    assert_close(output, wanted)
    assert weights.shape == (B, H if is_attention else 0, T, T)


@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_reaches_every_part_in_training_alone(is_training):
    attention, feed_forward = _Recorder(), _Recorder()
    x = np.ones((B, T, 64), np.float32)

    def forward(x):
        layer = modules.EncoderLayer(
            lambda: attention,
            lambda: feed_forward,
            make_norm=lambda name: lambda x: 1 + 0 * x,
            dropout_rate=0.5,
        )
        return layer(x, is_training=is_training)[0]

    output = hk.transform(forward).apply({}, jax.random.key(0), x)
    rate = 0.5 if is_training else 0.0
    ((_, attention_call),) = attention.calls
    ((_, feed_forward_call),) = feed_forward.calls
    assert attention_call["dropout_rate"] == feed_forward_call["dropout_rate"] == rate
    # 1 + what is left of the attention's 1 + what is left of the feed-forward's 1.
    shares = [np.mean(output == value) for value in (1, 3, 5)]
    assert_close(shares, [0.25, 0.5, 0.25] if is_training else [0, 1, 0], atol=0.08)


def test_training_needs_a_key_for_dropout_and_evaluation_none(
    normal, random_parameters
):
    x = normal(B, T, D)
    model = _encoder(functools.partial(_layer, dropout_rate=0.1), num_layers=1)
    params = random_parameters(model, x)
    for is_training in (False, True):
        run = functools.partial(model.apply, is_training=is_training)
        expected = contextlib.nullcontext()
        if is_training:
            expected = pytest.raises(ValueError, match="PRNGKey")
        with expected:
            jax.eval_shape(run, params, None, x)


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
            "num_heads must be left out where make_attention is given, got 1",
        ),
        (
            lambda: modules.EncoderLayer(num_heads=-1, hidden_size=1),
            "num_heads must be .* got -1",
        ),
        (
            lambda: _layer(0, parallel=True, norm_position="post"),
            "parallel parts must both have a residual and a norm_position of pre or",
        ),
        (
            lambda: _layer(0, parallel=True, attention_residual=False),
            "parallel parts must both have a residual",
        ),
        (
            lambda: modules.Encoder(1, _layer, num_heads=2),
            "make_layer must be left out .* both it and num_heads",
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


def test_maps_and_outputs_go_through_scan(normal, random_parameters):
    xs = normal(3, B, T, D)
    model = hk.transform(lambda x: modules.Encoder(1, _layer)(x, is_training=False))
    params = random_parameters(model, xs[0])

    @jax.jit
    def scanned(xs):
        _, results = jax.lax.scan(
            lambda carry, x: (carry, model.apply(params, None, x)), 0, xs
        )
        return results

    outputs, (stacked,) = scanned(xs)
    output, (attention_map,) = jax.jit(model.apply)(params, None, xs[2])
    assert stacked.shape == (3, B, H, T, T)
    assert_close(outputs[2], output)
    assert_close(np.asarray(stacked)[2], attention_map)
