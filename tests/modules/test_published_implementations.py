"""Four published implementations, written again in `oracles.py`, agree with ours."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from mha_haiku import attention, masks, modules
from tests import oracles

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def _attention(*args, **kwargs):
    """Our module "mha" as a function that gives its output and its weights."""

    def forward(query, key, value, mask):
        module = modules.MultiHeadAttention(*args, name="mha", **kwargs)
        output, attention_map = module(query, key, value, mask)
        return output, attention_map.weights()

    return hk.transform(forward)


def test_haiku_style_attention_with_a_mask_of_keys(normal, random_parameters):
    B, T, S, H, D = 2, 3, 5, 7, 28
    query, key, value = normal(B, T, D), normal(B, S, D), normal(B, S, D)
    mask = np.array([[[1, 1, 0, 1, 0]], [[0, 1, 1, 1, 1]]])
    model = _attention(num_heads=H, key_size=D // H, model_size=D)
    params = random_parameters(model, query, key, value, mask)
    output, weights = jax.jit(model.apply)(params, None, query, key, value, mask)
    wanted, wanted_weights = oracles.haiku_style(
        oracles.nested(params, "mha"), query, key, value, mask, d_model=D, num_heads=H
    )
    assert weights.shape == (B, H, T, S)
    assert_close(output, wanted)
    assert_close(weights, wanted_weights)


def test_stacked_blocks_of_single_heads(normal, random_parameters):
    B, T, H, K, F = 2, 3, 7, 4, 13
    gelu = functools.partial(jax.nn.gelu, approximate=False)

    def layer(i):
        return modules.EncoderLayer(
            lambda: modules.MultiHeadAttention(H, K, name="attention"),
            lambda: modules.FeedForward(F, activation=gelu, name="feed_forward"),
            dropout_rate=0.1,
            name=f"layer_{i}",
        )

    def forward(x):
        return modules.Encoder(2, layer)(x, is_training=False)[0]

    x = normal(B, T, H * K)
    model = hk.transform(forward)
    params = random_parameters(model, x)
    wanted = x
    for i in range(2):
        own = oracles.nested(params, f"encoder/layer_{i}")
        wanted = oracles.block_of_single_heads(own, wanted, num_heads=H)
    assert_close(jax.jit(model.apply)(params, None, x), wanted)


@pytest.mark.parametrize("scoring", ["dot_product", "additive"])
@pytest.mark.parametrize(
    "valid_lens", [[3, 2], [[1, 2, 3, 6], [5, 4, 2, 1]]], ids=["examples", "queries"]
)
def test_valid_lens_attention(scoring, valid_lens, normal, random_parameters):
    queries, keys, values = normal(2, 4, 100), normal(2, 6, 100), normal(2, 6, 100)
    valid_lens = np.array(valid_lens)
    # In evaluation the published dropout of 0.5 is off, as ours is unless asked for.
    model = _attention(
        num_heads=5,
        key_size=20,
        with_bias=False,
        pattern=modules.Pattern(
            modules.additive_score if scoring == "additive" else None
        ),
    )
    inputs = queries, keys, values, masks.valid_lens(valid_lens)
    params = random_parameters(model, *inputs)
    own = oracles.nested(params, "mha")
    assert ("score" in own) == (scoring == "additive")
    output, weights = jax.jit(model.apply)(params, None, *inputs)
    wanted, wanted_weights = oracles.valid_lens_attention(
        own,
        queries,
        keys,
        values,
        valid_lens,
        num_heads=5,
        score_weights=own.get("score"),
    )
    assert output.shape == (2, 4, 100)
    assert_close(output, wanted)
    assert_close(weights, wanted_weights)


@pytest.mark.parametrize("scale", [None, (28 / 7) ** -0.5], ids=["default", "given"])
def test_unbatched_attention_of_another_width(scale, normal, random_parameters):
    T, D, heads, hidden = 5, 3, 7, 28
    x = normal(T, D)
    model = _attention(
        heads,
        hidden // heads,
        pattern=modules.Pattern(lambda H, K: attention.dot_product(scale=scale)),
    )
    params = random_parameters(model, x, x, x, None)
    output, weights = jax.jit(model.apply)(params, None, x, x, x, None)
    wanted = oracles.unbatched_attention(
        oracles.nested(params, "mha"), x, hidden=hidden, heads=heads
    )
    assert output.shape == (T, hidden)
    assert weights.shape == (heads, T, T)
    assert_close(output, wanted)
