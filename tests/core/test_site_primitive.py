"""Programs in which nothing is looked at are those without sites."""

import collections
import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from mha_haiku import models
from mha_haiku.core import site_primitive
from mha_haiku.training.runs.configuration import default_config

B, T = 2, 5
TOKENS, CLASSES = 7, 6


@contextlib.contextmanager
def without_sites():
    """Makes sites plain values."""
    with (
        mock.patch.object(site_primitive, "site", lambda name, value: value),
        mock.patch.object(site_primitive, "faceted", lambda value, *_: value),
    ):
        yield


def model_of(family, **fields):
    config = default_config("sort").model.replace(
        family=family,
        num_layers=2,
        model_size=12,
        attention=dict(num_heads=3),
        feed_forward=dict(hidden_size=8),
        **fields,
    )
    return models.build(
        config, num_tokens=TOKENS, feature_size=None, num_classes=CLASSES
    )


MODELS = {
    "looped": ("encoder", {}),
    "scanned": ("causal", {"scan_layers": True}),
    "both halves": ("encoder_decoder", {}),
    "dropout": ("encoder", {"dropout_rate": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_site_leaves_no_instruction_in_compiled_programs(name):
    family, fields = MODELS[name]
    inputs = {"inputs": jnp.ones((B, T), jnp.int32)}
    if family == "encoder_decoder":
        inputs["decoder_inputs"] = jnp.ones((B, T + 1), jnp.int32)
    is_training = name == "dropout"
    params = model_of(family, **fields).init(jax.random.key(0), **inputs)

    def texts():
        model = model_of(family, **fields)

        def loss(params, inputs):
            output = model.apply(
                params, jax.random.key(1), **inputs, is_training=is_training
            )
            return jnp.square(output.logits).sum()

        def step(params, inputs):
            slopes = jax.grad(loss)(params, inputs)
            return jax.tree.map(lambda x, slope: x - 0.1 * slope, params, slopes)

        def per_example(params, inputs):
            one = jax.vmap(
                lambda inputs: loss(params, jax.tree.map(lambda x: x[None], inputs))
            )
            return one(inputs)

        return [
            jax.jit(function).lower(params, inputs).as_text()
            for function in (loss, jax.grad(loss), step, per_example)
        ]

    with without_sites():
        plain = texts()
    own = texts()
    if jax.__version_info__ >= (
        0,
        11,
    ):  # which may keep a scan's residuals in any order
        plain, own = map(instructions, plain), map(instructions, own)
    assert list(own) == list(plain)


def instructions(text):
    """Returns how often each instruction is in a program."""
    return collections.Counter(re.findall(r"stablehlo\.\w+", text))
