"""Scores that a config can name, and that one more costs a class and a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, heads, models
from mha_haiku.core import checks

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
def test_a_query_of_zeros_attends_to_all_alike_with_finite_gradients(rng_arrays):
    query, key, value = rng_arrays
    query = query.at[0, 1].set(0)

    def total(query):
        values, _ = attention.attend(query, key, value, score=attention.cosine())
        return (values**2).sum()

    _, own = attention.attend(query, key, value, score=attention.cosine())
    np.testing.assert_allclose(own.weights()[0, :, 1], 1 / key.shape[1], rtol=1e-6)
    assert np.isfinite(jax.grad(total)(query)).all()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "formula"])
def test_cosines_with_gradients_of_the_scale(rng_arrays, implementation):
    query, key, value = rng_arrays

    def total(scale, implementation):
        values, _ = attention.attend(
            *(query, key, value),
            score=attention.cosine(scale),
            implementation=implementation,
        )
        return (values**2).sum()

    scale = jnp.array([2.0, 3.0])
    wanted = jax.grad(total)(scale, "formula")
    found = jax.grad(total)(scale, implementation)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    step = jnp.array([1e-2, 0])
    slope = total(scale + step, implementation) - total(scale - step, implementation)
    np.testing.assert_allclose(found[0], slope / 2e-2, rtol=2e-2)


@pytest.fixture
def rng_arrays():
    rng = np.random.default_rng(0)
    sizes = (2, 6, 2, K), (2, 7, 2, K), (2, 7, 2, V)
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]


@pytest.mark.slow
def test_a_pruned_head_takes_its_learned_scale_with_it():
    config = _config(score="cosine")
    _, params = _output(config)
    scale = jnp.arange(1.0, H + 1)
    params["encoder/layer_0/attention"]["cosine_scale"] = scale
    pruned, smaller = heads.prune(params, config, [[0, 2]])
    kept = pruned["encoder/layer_0/attention"]["cosine_scale"]
    np.testing.assert_array_equal(kept, [1, 3])
    assert _output(smaller, pruned)[0].logits.shape == (2, 6, V)


@pytest.mark.slow
def test_norms_over_all_heads_cannot_lose_a_head():
    config = _config(qk_norm=True, qk_norm_over="layer")
    _, params = _output(config)
    scale = params["encoder/layer_0/attention/query_norm"]["scale"]
    assert scale.shape == (H * K,)
    with pytest.raises(ValueError, match="qk_norm_over = 'layer'"):
        heads.prune(params, config, [[0, 2]])
    config = config.replace(attention=dict(kept_heads=[[0, 2]]))
    with pytest.raises(checks.ConfigError, match="kept_heads must be None"):
        models.check(config)
