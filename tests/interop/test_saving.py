"""What is saved opens elsewhere and comes back as it was."""

import json

import jax
import numpy as np
import pytest

from mha_haiku import heads, interop, models
from mha_haiku.core import arrays, checks, sites
from mha_haiku.interop import loading
from mha_haiku.training.tasks import tokenization
from tests.interop import small_models, test_families
from tests.tiny_runs import model_config


def _stored(folder):
    found = arrays.read_safetensors(folder / "model.safetensors")
    return {name: array.read() for name, array in found.items()}


@pytest.mark.parametrize("case", test_families.EVERYDAY)
def test_what_was_loaded_saves_as_it_was_stored(case, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    imported = interop.load(small_models.write(before, case))
    kind = json.loads((before / "config.json").read_text())["model_type"]
    interop.save(after, imported.config, imported.params, family=kind)
    found, wanted = _stored(after), _stored(before)
    unread = {
        name
        for name in wanted
        if name not in found and ("pooler" in name or "seq_relationship" in name)
    }
    assert set(found) == set(wanted) - unread
    for name, x in found.items():
        if "vit" not in case and case != "gpt2_scaled" and "position_embed" not in name:
            np.testing.assert_allclose(x, wanted[name], rtol=0, atol=2e-7)
    again = interop.load(after)
    sized = [
        config.replace(attention=dict(key_size=models.key_size(config)))
        for config in (again.config, imported.config)
    ]
    if case != "gpt2_scaled":
        assert sized[0] == sized[1]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=3e-7),
        again.params,
        imported.params,
    )


@pytest.mark.parametrize(
    ("case", "architecture"),
    [("gpt2", "GPT2LMHeadModel"), ("qwen2", "Qwen2ForCausalLM")],
)
def test_the_family_is_found_that_can_hold_a_model(case, architecture, tmp_path):
    imported = interop.load(small_models.write(tmp_path, case))
    interop.save(tmp_path / "saved", imported.config, imported.params)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [architecture]


@pytest.fixture
def pruned(tmp_path):
    """A pruned model: what it was, its config and its parameters."""
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    keep = np.array([[True, False, True, True], [False, True, True, True]])
    params, config = heads.prune(imported.params, imported.config, keep)
    return imported, keep, params, config


def test_pruned_models_are_saved_with_zeros_or_as_they_are(pruned, tmp_path, caplog):
    imported, keep, params, config = pruned
    interop.save(tmp_path / "whole", config, params)
    assert "2 pruned heads are written with weights of 0" in caplog.text
    whole = interop.load(tmp_path / "whole")
    assert whole.config.to_json() == imported.config.to_json()
    zeroed = heads.scaled(imported.params, imported.config, 1.0 * keep)
    module = "encoder/layer_0/attention/linear"
    np.testing.assert_array_equal(whole.params[module]["w"], zeroed[module]["w"])
    size = whole.params[module]["w"].shape[0] // keep.shape[1]
    query = whole.params["encoder/layer_0/attention/query"]["w"]
    assert not query[:, size : 2 * size].any() and query[:, :size].any()
    interop.save(tmp_path / "saved", config, params, family="mha_haiku")
    again = interop.load(tmp_path / "saved")
    assert again.config.to_json() == config.to_json()
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    # What was pruned equals what is gated.
    tokens = small_models.inputs("gpt2")
    gated_apply = sites.edit(imported.model.apply, heads.edits.gate(1.0 * keep))

    @jax.jit
    def logits(params, params_of_gated):
        gated = gated_apply(params_of_gated, None, tokens, is_training=False)
        found = again.model.apply(params, None, tokens, is_training=False)
        return found.logits, gated.logits

    found, gated = logits(again.params, imported.params)
    np.testing.assert_allclose(found, gated, rtol=0, atol=1e-5)


def test_rotary_frequencies_of_no_known_kind_are_refused(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "llama"))
    frequencies = [1.0, 0.9, 0.2, 0.1]
    config = imported.config.replace(embedding=dict(frequencies=frequencies))
    with pytest.raises(checks.ConfigError, match="cannot say these rotary freq"):
        interop.save(tmp_path, config, imported.params, family="llama")


def test_half_precision_and_scanned_layers_save_as_they_are(tmp_path):
    folder = small_models.write(tmp_path, "qwen2")
    imported = interop.load(folder, dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(imported.params)} == {"bfloat16"}
    stacked = models.stacked(imported.params)
    scanned = imported.config.replace(scan_layers=True)
    interop.save(tmp_path / "saved", scanned, stacked)
    found = _stored(tmp_path / "saved")
    wanted = _stored(folder)
    assert set(found) == set(wanted)
    for name, x in found.items():
        assert x.dtype.name == "bfloat16"
        np.testing.assert_array_equal(x, wanted[name].astype(x.dtype))


def test_what_transformers_has_no_word_for_is_named(tmp_path):
    config = model_config(embedding__positions="alibi", attention__num_heads=2)
    sizes = interop.Sizes(num_tokens=7, feature_size=None, num_classes=7)
    model = models.build(config, **sizes._asdict())
    params = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), loading.shapes(config, model, sizes)
    )
    with pytest.raises(checks.ConfigError, match="bert cannot say .*\n"):
        interop.save(tmp_path, config, params, family="bert")
    with pytest.raises(checks.ConfigError, match="family must be one of.*'llama'"):
        interop.save(tmp_path, config, params, family="lama")
    interop.save(tmp_path, config, params, family="mha_haiku")
    again = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("sinks = 'learned'", {"sinks": "learned"}),
        ("sinks = 0.5", {"sinks": 0.5}),
        ("gate = 'channel'", {"gate": "channel"}),
        (
            "score = 'sigmoid', attention.normalizer = 'none'",
            {"score": "sigmoid", "normalizer": "none"},
        ),
        ("temperature = 2.0", {"temperature": 2.0}),
    ],
)
def test_options_that_no_family_has_are_named_and_our_own_file_holds_them(
    said, fields, tmp_path
):
    imported = interop.load(small_models.write(tmp_path, "llama"))
    config = imported.config.replace(attention=fields)
    sizes = loading.sizes_of(imported.params)
    model, generator = models.build(config, **sizes._asdict()), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(generator.standard_normal(x.shape)),
        loading.shapes(config, model, sizes),
    )
    own = tmp_path / "own"
    with pytest.raises(checks.ConfigError) as error:
        interop.save(own, config, params)
    assert f"llama cannot say attention.{said}" in str(error.value)
    assert "family='mha_haiku' writes it" in str(error.value)
    with pytest.raises(checks.ConfigError, match="cannot say"):
        interop.save(own, config, params, family="llama")
    interop.save(own, config, params, family="mha_haiku")
    again = interop.load(own)
    assert again.config.to_json() == config.to_json()
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_parameters_of_another_model_are_refused(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    params = dict(imported.params)
    extra = {**params, "other": {"w": np.zeros(3)}}
    with pytest.raises(checks.ConfigError, match="also have other/w"):
        interop.save(tmp_path / "saved", imported.config, extra)
    del params["encoder/norm"]
    with pytest.raises(checks.ConfigError, match="must have encoder/norm/scale"):
        interop.save(tmp_path / "saved", imported.config, params)


def test_tokenizers_go_along(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    own = tokenization.Characters.train("abc", 10)
    with pytest.raises(checks.ConfigError, match="tokenizer must be of byte pairs"):
        interop.save(tmp_path / "s", imported.config, imported.params, tokenizer=own)
