"""Refusals of configs by `models.check`, and their messages."""

import math

import pytest

from mha_haiku import models
from mha_haiku.core import checks
from tests.tiny_runs import model_config

ROTARY = {"embedding__positions": "rotary", "attention__key_size": 4}
_REFUSALS = [
    ({"family": "decoder"}, "family must be one of encoder, causal, set_classifier"),
    ({"embedding__max_length": "8"}, "embedding.max_length must be an integer .*'8'"),
    ({"attention__score": "sigmoids"}, "attention.score must .* you mean 'sigmoid'?"),
    ({"attention__window": -1}, "attention.window must be an integer from 0 to .*-1"),
    ({"attention__window": [1, None]}, "attention.window must be .* integer"),
    ({"norm__position": "both"}, "norm.position must be one of pre, post; got 'both'"),
    ({"attention__residual": 1}, "attention.residual must be True or False, got 1"),
    ({"attention__kept_heads": 5}, "attention.kept_heads must be a list, got 5"),
    (
        {"attention__kept_heads": [5]},
        r"attention.kept_heads\[0\] must be a list, got 5",
    ),
    (
        {"attention__kept_heads": [[0], [0]]},
        "attention.kept_heads must have an entry for each of the 1 layers, got",
    ),
    (
        {"attention__kept_heads": [[0]], "scan_layers": True},
        "scan_layers must be False with attention.kept_heads",
    ),
    (
        {"feed_forward__hidden_sizes": [0]},
        r"feed_forward.hidden_sizes\[0\] must be an integer from 1 to",
    ),
    ({"model_size": 10**20}, "model_size must be an integer from 1 to 1048576, got 1"),
    (
        {"attention__num_heads": 0, "feed_forward__hidden_size": 0},
        "attention.num_heads or feed_forward.hidden_size must be above 0, got 0 for b",
    ),
    (
        {"attention__num_heads": 5},
        "attention.num_heads must divide model_size = 32 where key_size is not given, "
        "got 5; the nearest that does is 4.",
    ),
    (
        {
            "attention__num_heads": 12,
            "attention__key_size": 4,
            "attention__num_key_value_heads": 7,
        },
        "attention.num_key_value_heads must divide num_heads = 12, got 7; the nearest "
        "that does is 6.",
    ),
    (
        {"embedding__positions": "rotary", "attention__key_size": 3},
        "embedding.positions = 'rotary' needs an even key size, got 3.",
    ),
    (
        {"embedding__positions": "sinusoidal", "model_size": 9},
        "embedding.positions = 'sinusoidal' needs an even model_size, got 9.",
    ),
    (
        {"embedding__positions": "t5", "attention__num_heads": 0},
        "embedding.positions = 't5' works through attention",
    ),
    (
        {"embedding__frequencies": [0.1]},
        "embedding.frequencies is only for rotary positions, .* positions = 'learned'",
    ),
    (
        {**ROTARY, "embedding__frequencies": [0.1, 2.0, 1.0]},
        "embedding.frequencies must have a number for each of the key_size / 2 = 2 .* "
        "got 3",
    ),
    (
        {**ROTARY, "embedding__frequencies": [0.1, math.nan]},
        r"embedding.frequencies\[1\] must be a finite number of at least 0, got nan",
    ),
    (
        {"embedding__norm": True, "norm__kind": "none"},
        "embedding.norm must be False with norm.kind = 'none'",
    ),
    (
        {"output__tied": True, "family": "set_classifier"},
        "output.tied must be False for a set_classifier",
    ),
    (
        {"output__logits": False, "family": "set_classifier"},
        "output.logits must be True for a set_classifier",
    ),
    (
        {"output__logits": False, "output__hidden": "tanh"},
        "output.hidden must be None with logits = False: .* got 'tanh'",
    ),
    ({"attention__offset": -1.0}, "attention.offset is only for score = sigmoid, and"),
    ({"attention__sinks": "learnt"}, "attention.sinks must be None, 'learned' or a nu"),
    ({"attention__gate": "heads"}, "attention.gate must .* Did you mean 'head'?"),
    (
        {"attention__normalizer": "none"},
        "attention.normalizer = 'none' needs score = sigmoid",
    ),
    (
        {
            "attention__normalizer": "none",
            "attention__score": "sigmoid",
            "attention__sinks": 0,
        },
        "attention.sinks is only for normalizer = softmax, and must be None",
    ),
]


@pytest.mark.parametrize(("fields", "message"), _REFUSALS)
def test_fields_out_of_range_are_refused_by_their_path(fields, message):
    with pytest.raises(checks.ConfigError, match=rf"^config\.model\.{message}") as told:
        models.check(model_config(**fields))
    assert len(str(told.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention__num_heads": 5, "attention__key_size": 3},
        {"attention__num_heads": 4, "attention__num_key_value_heads": 2},
        {"embedding__positions": "sinusoidal", "attention__num_heads": 32},
        {"embedding__positions": "rotary", "attention__num_heads": 16},
        {"attention__implementation": "fused"},
        {"attention__num_heads": 0, "embedding__positions": "sinusoidal"},
        {**ROTARY, "embedding__frequencies": [1, 0.5], "scan_layers": True},
        {"output__logits": False, "output__pool": "mean"},
    ],
)
def test_fields_in_range_are_accepted(fields):
    models.check(model_config(**fields))
