"""A model with a decoder as files: of parameters, and of a program."""

import jax
import numpy as np
import pytest

from mha_haiku import interop, models
from mha_haiku.core import checks
from tests.tiny_runs import model_config

B, S, T, SOURCES, TARGETS = 2, 5, 3, 13, 7


@pytest.fixture
def model_and_params():
    def make(**fields):
        config = model_config(
            family="encoder_decoder",
            decoder__num_layers=2,
            model_size=8,
            num_heads=2,
            hidden_size=6,
            max_length=8,
            **fields,
        )
        model = models.build(
            config, num_tokens=SOURCES, feature_size=None, num_classes=TARGETS
        )
        tokens = np.zeros((1, 1), np.int32)
        return (
            config,
            model,
            jax.jit(model.init)(jax.random.key(0), tokens, None, tokens),
        )

    return make


def _given():
    generator = np.random.default_rng(0)
    return {
        "inputs": np.int32(generator.integers(0, SOURCES, (B, S))),
        "lengths": np.array([S, 2], np.int32),
        "decoder_inputs": np.int32(generator.integers(0, TARGETS, (B, T))),
        "decoder_lengths": np.array([2, T], np.int32),
    }


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_was_saved_loads(model_and_params, tmp_path, is_tied):
    config, model, params = model_and_params(output__tied=is_tied)
    interop.save(tmp_path, config, params, family="mha_haiku")
    loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, dict(params))
    assert loaded.config.decoder.num_layers == 2
    assert interop.sizes_of(params).num_classes == TARGETS
    with pytest.raises(checks.ConfigError, match="No family of transformers holds"):
        interop.save(tmp_path / "other", config, params)
