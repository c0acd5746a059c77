"""A config.json means what `transformers` 5 reads in it, in older words too."""

import copy
import math

import pytest

from mha_haiku.core import checks
from mha_haiku.interop import loader
from mha_haiku.interop.families import name_tables
from tests.interop import small_models

LAYOUTS = small_models.layouts()


def model_of(config):
    """Returns the `config.model` that a config.json describes."""
    family = loader.family_of(config)
    head = loader.head_of(family, config)
    return loader.read_fields(family, head, config)[0]


def _read(case, change):
    """Returns `config.model` of a case whose config.json was changed."""
    config = copy.deepcopy(LAYOUTS[case]["config"])
    change(config)
    return model_of(config)


def _as_it_is(config):
    pass


def _old_rotary(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope.pop("rope_type") != "default":
        config["rope_scaling"] = {"rope_type": "llama3", **rope}


def _older_scaling(config):
    _old_rotary(config)
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")


def _without_defaults(config):
    for name in ("layer_norm_eps", "hidden_act", "tie_word_embeddings"):
        del config[name]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", _old_rotary),
        ("llama_3", _old_rotary),
        ("llama_3", _older_scaling),
        ("bert", _without_defaults),
    ],
)
def test_old_words_mean_the_same(case, change):
    assert _read(case, change) == _read(case, _as_it_is)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, 3),
        ({"sliding_window": None}, None),
        ({"layer_types": ["full_attention"] * 2}, 3),  # which is not read there
    ],
)
def test_windows_count_the_query_there_and_not_here(fields, window):
    found = _read("mistral", lambda config: config.update(fields))
    assert found.attention.window == window


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        # What transformers fails on, or does not implement as we do.
        ("llama", {"rope_scaling": _YARN}, "rope_type.* got 'yarn'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear"}},
            "rope_scaling.factor must",
        ),
        (
            "llama",
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "partial_rotary_factor": 0.5,
            },
            "rope_scaling.partial_rotary_factor must be 1",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    **LAYOUTS["llama_3"]["config"]["rope_parameters"],
                    "high_freq_factor": 1.0,
                }
            },
            "high_freq_factor must be above low_freq_factor = 1.0, got 1.0",
        ),
        (
            "llama",
            {"head_dim": 7, "rope_scaling": {"type": "linear", "factor": 2}},
            "even",
        ),
        # Options that change numbers there and are not supported.
        *(
            (case, {"is_causal": False}, "is_causal = False is not supported")
            for case in ("llama", "gpt2")
        ),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not"),
        ("bert", {"is_decoder": True}, "is_decoder = True is not supported"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config = .* not supp"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_att"),
        ("qwen3", {"num_experts": 8}, "num_experts = 8 is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_ty"),
        ("llama", {"hidden_act": "relu"}, "hidden_act must be one of silu"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "got 'dynamic'"),
    ],
)
def test_settings_that_would_give_other_numbers_are_refused(case, change, message):
    with pytest.raises(checks.ConfigError, match=message):
        model_of(small_models.changed(case, change))


@pytest.mark.parametrize(
    ("case", "change", "same"),
    [
        ("gemma", {"hidden_act": "gelu"}, {}),  # of all official files
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu"}, {}),
        ("qwen2", {"rms_norm_eps": None}, {"rms_norm_eps": 1e-6}),
        ("bert_classes", {"num_labels": 3}, {"id2label": {"0": "", "1": "", "2": ""}}),
        ("bert_classes", {"id2label": None}, {"id2label": {"0": "no", "1": "yes"}}),
    ],
)
def test_words_mean_what_they_mean_in_transformers(case, change, same):
    found, wanted = (small_models.changed(case, each) for each in (change, same))
    assert model_of(found) == model_of(wanted)


_WRONG = [
    *("x", "nan", "", [], [1], ["x"], {}, {"x": 1}, True, False, None, 1.5, -1, 0),
    *(math.nan, math.inf, -math.inf, 10**39, 10**400, 1e39, 5e-324),
]


@pytest.mark.parametrize(
    "case",
    [case for case in small_models.CASES if "_" not in case] + ["bert_classes"],
)
def test_a_setting_of_a_wrong_type_or_size_is_named(case):
    """Each key, and each key of rotary positions, with each value; nothing else."""
    config = LAYOUTS[case]["config"]
    family = loader.family_of(config)
    head = loader.head_of(family, config)
    keys = name_tables.keys_of(family, head)
    changes = [{name: value} for name in keys for value in _WRONG]
    if "rope_parameters" in keys:
        rope = LAYOUTS["llama_3"]["config"]["rope_parameters"]
        ropes = [{**rope, name: value} for name in rope for value in _WRONG]
        changes += [{"rope_scaling": rope} for rope in ropes]
        changes += [{"rope_parameters": {"full_attention": rope}} for rope in ropes]
    refused = set()
    for change in changes:
        try:
            model_of({**config, **change})
        except checks.ConfigError as error:
            assert str(error).count("\n") < 2
            refused |= set(change)
    assert refused >= set(keys)


def test_frequencies_say_all_rotary_kinds():
    assert _read("llama", _as_it_is).embedding.frequencies is None
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 16.0}
    found = _read("llama", lambda c: c.update(rope_parameters=linear))
    # K = 8: 16^(-2i / 8) / 4 = 2^-i / 4.
    assert list(found.embedding.frequencies) == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
