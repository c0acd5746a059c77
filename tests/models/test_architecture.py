"""What `models.check` refuses of a config, and how it says so."""

import math

import pytest

from configs import reverse
from mha_haiku import checks, models


def _config(**fields):
    """Reverse's config of a model, with fields replaced."""
    config = reverse.get_config().model
    with config.ignore_type():
        config.update(fields)
    return config


_REFUSALS = [
    ({"family": "decoder"}, "family must be one of encoder, causal, set_classifier"),
    ({"family": "casual"}, "family .* Did you mean 'causal'?"),
    ({"activation": "gleu"}, "activation .* got 'gleu'. Did you mean 'gelu'?"),
    ({"norm": "batch_norm"}, "norm must be one of layer_norm, rms_norm; got"),
    ({"norm_position": "middle"}, "norm_position must be one of pre, post; got"),
    ({"positions": "rotory"}, "positions .* Did you mean 'rotary'?"),
    ({"precision": "float16"}, "precision must be one of float32, bfloat16; got"),
    (
        {"attention": {"implementation": "blockwize"}},
        "attention.implementation must be one of auto, dense, blockwise, fused, "
        "formula; got 'blockwize'. Did you mean 'blockwise'?",
    ),
    ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
    ({"num_heads": -3}, "num_heads must be an integer of at least 1, got -3"),
    ({"model_size": 1.5}, "model_size must be an integer of at least 1, got 1.5"),
    ({"hidden_size": True}, "hidden_size must be an integer of at least 1, got True"),
    ({"max_length": "8"}, "max_length must be an integer of at least 1, got '8'"),
    ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number above 0, got 0.0"),
    ({"norm_epsilon": math.nan}, "norm_epsilon must be a finite number above 0"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), got 1.0"),
    ({"key_size": 0}, "key_size must be an integer of at least 1, got 0"),
    (
        {"key_size": None, "model_size": 32, "num_heads": 5},
        "num_heads must divide model_size = 32 where key_size is not given, got 5; "
        "the nearest that does is 4.",
    ),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer of at least"),
    (
        {"num_heads": 12, "key_size": 4, "num_key_value_heads": 7},
        "num_key_value_heads must divide num_heads = 12, got 7; the nearest that does "
        "is 6.",
    ),
    (
        {"positions": "rotary", "key_size": 3},
        "positions = 'rotary' needs an even key size, got 3.",
    ),
    (
        {"positions": "sinusoidal", "model_size": 9},
        "positions = 'sinusoidal' needs an even model_size, got 9.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), _REFUSALS)
def test_fields_out_of_range_are_refused_by_their_path(fields, message):
    with pytest.raises(checks.ConfigError, match=rf"^config\.model\.{message}"):
        models.check(_config(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_heads": 5, "key_size": 3},
        {"num_heads": 4, "num_key_value_heads": 2},
        {"positions": "sinusoidal", "num_heads": 32},
        {"positions": "rotary", "num_heads": 16},
        {"attention": {"implementation": "fused"}},
    ],
)
def test_fields_in_range_are_accepted(fields):
    models.check(_config(**fields))
