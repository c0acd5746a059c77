"""Differential attention; models/test_formula.py has its numbers."""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from mha_haiku import heads, models, modules
from mha_haiku.core import checks

B, T, D, H, K = 2, 5, 12, 4, 3


def _model(**options):
    return hk.transform(
        lambda x, mask=None: modules.DifferentialAttention(
            H, K, model_size=D, name="attention", **options
        )(x, x, x, mask)
    )


def _inputs(model):
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    return x, model.init(jax.random.key(1), x)


@pytest.mark.slow
def test_projections_have_the_sizes_of_plain_attention():
    model = _model()
    _, params = _inputs(model)
    sizes = {name: value["w"].shape for name, value in params.items() if "w" in value}
    assert sizes == {
        "attention/query": (D, H * K),
        "attention/key": (D, H * K),
        "attention/value": (D, H * K),
        "attention/linear": (H * K, D),
    }
    assert params["attention/difference_norm"]["scale"].shape == (2 * K,)
    assert {x.shape for x in params["attention"].values()} == {(K,)}


@pytest.mark.slow
def test_one_map_of_two_cannot_be_removed_nor_read_alone():
    config = models.ModelConfig().replace(
        model_size=D, attention=dict(num_heads=H, differential=True)
    )
    model = models.build(config, num_tokens=7, num_classes=7, feature_size=None)
    tokens = jnp.array([[1, 2, 3]])
    params = model.init(jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="differential = True: two maps share"):
        heads.prune(params, config, [[0, 1]] * config.num_layers)
    with pytest.raises(ValueError, match="no separate weights with differential"):
        heads.weights(model, params, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "key_size": 4}, "even num_heads"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = None"),
        ({"gate": "channel"}, "gate = 'none' or 'head'"),
        ({"kept_heads": [[0, 1]]}, "kept_heads must be None with differential"),
    ],
)
def test_what_does_not_go_with_differences_is_refused(changes, message):
    config = models.ModelConfig().replace(
        model_size=D, attention={"num_heads": H, "differential": True} | changes
    )
    with pytest.raises(checks.ConfigError, match=message):
        models.check(config)
