"""A config.json means the same in the words of `transformers` 4 and of 5."""

import pytest

from mha_haiku import models
from mha_haiku.interop import loading
from tests.interop import small_models


def _read(case, change):
    """Returns `config.model` of a case whose config.json was changed."""
    config = dict(small_models.expected()[case]["config"])
    change(config)
    family = loading.family_of(config)
    head = loading.head_of(family, config, ())
    return loading.read_fields(family, head, config)[0]


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


def _old_neox(config):
    rope = config.pop("rope_parameters")
    config["rotary_emb_base"] = rope["rope_theta"]
    config["rotary_pct"] = rope["partial_rotary_factor"]


def _old_windows(config):
    _old_rotary(config)
    del config["layer_types"]


def _old_gemma_3(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = 2
    del config["layer_types"]


def _without_defaults(config):
    for name in ("layer_norm_eps", "hidden_act", "tie_word_embeddings"):
        del config[name]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", _old_rotary),
        ("llama_3", _old_rotary),
        ("llama_3", _older_scaling),
        ("mistral", _old_rotary),
        ("qwen2", _old_windows),
        ("qwen2_windows", _old_windows),
        ("qwen3", _old_windows),
        ("gemma2", _old_windows),
        ("gemma3", _old_gemma_3),
        ("gpt_neox", _old_neox),
        ("gpt_neox_in_turn", _old_neox),
        ("bert", _without_defaults),
    ],
)
def test_old_words_mean_the_same(case, change):
    assert _read(case, change) == _read(case, _as_it_is)


@pytest.mark.parametrize(
    ("case", "fields", "windows"),
    [
        ("mistral", {}, (3, 3)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2_windows", {}, (None, 3)),
        # A window that is written down and not used.
        ("qwen2_windows", {"use_sliding_window": False}, (None, None)),
        ("gemma2", {}, (3, None)),
        ("gemma3", {"layer_types": ["sliding_attention"] * 2}, (3, 3)),
    ],
)
def test_windows_count_the_query_there_and_not_here(case, fields, windows):
    assert models.windows(_read(case, lambda config: config.update(fields))) == windows


def test_frequencies_say_all_rotary_kinds():
    assert _read("llama", _as_it_is).embedding.frequencies is None
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 16.0}
    found = _read("llama", lambda c: c.update(rope_parameters=linear))
    # K = 8: 16^(-2i / 8) / 4 = 2^-i / 4.
    assert list(found.embedding.frequencies) == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    share = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 9.0}
    found = _read("gpt_neox", lambda c: c.update(rope_parameters=share))
    assert found.embedding.frequencies == pytest.approx([1, 1 / 3, 0, 0])
    by_layer = _read("gemma3", _as_it_is).embedding.frequencies
    # Bases 10^4 of the layer with a window, and 10^6.
    assert [row[2] for row in by_layer] == pytest.approx([1e-2, 1e-3])
