"""Decoder layers and their stack; models/test_formula.py has their numbers."""

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import masks, modules

B, T, S, H, K, F, L = 2, 3, 5, 7, 4, 11, 2
D = H * K

assert_equal = np.testing.assert_array_equal


def _layer(i, **kwargs):
    def attention(name):
        return lambda: modules.MultiHeadAttention(H, K, model_size=D, name=name)

    return modules.DecoderLayer(
        attention("attention"),
        attention("cross_attention"),
        lambda: modules.FeedForward(F, activation=jax.nn.relu, name="feed_forward"),
        name=f"layer_{i}",
        **kwargs,
    )


def _decoder(make_layer=_layer, num_layers=L, **kwargs):
    """A decoder as a function that gives its output and the weights of each layer."""

    def forward(*args, is_training=False, **call):
        decoder = modules.Decoder(num_layers, make_layer, **kwargs)
        output, maps = decoder(*args, is_training=is_training, **call)
        return output, [(each.own.weights(), each.cross.weights()) for each in maps]

    return hk.transform(forward)


@pytest.fixture
def inputs(normal):
    """The decoder's and the encoder's features, of two widths."""
    return normal(B, T, D), normal(B, S, 13)


@pytest.mark.slow
def test_a_mask_of_ones_own_comes_on_top_of_causality(inputs, random_parameters):
    model = _decoder()
    params = random_parameters(model, *inputs)
    mask = masks.padding(np.array([3, 1]))
    _, weights = jax.jit(model.apply)(params, None, *inputs, mask)
    seen = np.tril(np.ones((T, T), bool)) & (np.arange(T) < [[[3]], [[1]]])
    for own, _ in weights:
        assert_equal(own > 0, np.broadcast_to(seen[:, None], own.shape))


@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_reaches_every_part_in_training_alone(is_training):
    rates = []

    def part(x, *args, dropout_rate, bias=None):
        rates.append(dropout_rate)
        return (x, "map") if args else x

    def forward(x):
        layer = modules.DecoderLayer(
            *[lambda: part] * 3,
            make_norm=lambda name: lambda x: 1 + 0 * x,
            dropout_rate=0.5,
        )
        return layer(x, x, is_training=is_training)[0]

    x = np.ones((B, T, 64), np.float32)
    output = hk.transform(forward).apply({}, jax.random.key(0), x)
    assert rates == [0.5 if is_training else 0.0] * 3
    # The residual's 1, and what is left of a 1 of each part: 2 if kept, else 0.
    shares = [np.mean(output == value) for value in (1, 3, 4, 5, 7)]
    wanted = [1 / 8, 3 / 8, 0, 3 / 8, 1 / 8] if is_training else [0, 0, 1, 0, 0]
    np.testing.assert_allclose(shares, wanted, atol=0.07)


def test_a_decoder_needs_both_attentions():
    with pytest.raises(ValueError, match="make_cross_attention must be given where"):
        hk.transform(lambda: modules.DecoderLayer(lambda: None, hidden_size=1)).init(
            jax.random.key(0)
        )
