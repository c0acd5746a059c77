"""Patterns of attention of pruned heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models

D, H, K, V = 12, 4, 3, 5


def _config(**attention_fields):
    return models.ModelConfig().replace(
        model_size=D, attention={"num_heads": H, "key_size": K} | attention_fields
    )


def _output(config, params=None):
    model = models.build(config, num_tokens=V, num_classes=V, feature_size=None)
    tokens = jnp.array([[1, 2, 3, 4, 0, 2], [4, 4, 1, 0, 2, 3]])
    params = params or model.init(jax.random.key(0), tokens)
    return model.apply(params, None, tokens, is_training=False), params


@pytest.mark.slow
def test_a_pruned_head_takes_its_sink_with_it():
    config = _config(sinks="learned")
    _, params = _output(config)
    params["encoder/layer_0/attention"]["sinks"] = jnp.arange(1.0, H + 1)
    pruned, smaller = heads.prune(params, config, [[0, 2]])
    kept = pruned["encoder/layer_0/attention"]["sinks"]
    np.testing.assert_array_equal(kept, [1, 3])
    assert _output(smaller, pruned)[0].logits.shape == (2, 6, V)
