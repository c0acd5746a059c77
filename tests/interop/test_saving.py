"""Saved models open elsewhere and come back unchanged."""

import json

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, interop, models
from mha_haiku.core import arrays, checks, positions
from mha_haiku.interop import loading
from mha_haiku.training.runs import folders
from mha_haiku.training.tasks import tokenization
from tests import everyday
from tests.interop import small_models
from tests.tiny_runs import model_config, write_untrained


def _stored(folder):
    found = arrays.read_safetensors(folder / "model.safetensors")
    return {name: array.read() for name, array in found.items()}


@pytest.mark.parametrize(
    "case",
    everyday.some(small_models.CASES, 6),
)
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
    if case == "bert_untied":  # which has a second bias that is read
        wanted["cls.predictions.bias"] = wanted["cls.predictions.decoder.bias"]
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


@pytest.mark.slow
def test_pruned_models_are_saved_with_zeros_or_as_they_are(tmp_path, caplog):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    keep = np.array([[True, False, True, True], [False, True, True, True]])
    params, config = heads.prune(imported.params, imported.config, keep)
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


@pytest.mark.parametrize(
    ("key_size", "turning"), [(8, 8), (8, 4), (98, 2), (44, 30), (46, 26)]
)
def test_any_share_of_the_features_of_gpt_neox_is_written(key_size, turning, tmp_path):
    """Also all of them, which its files have to say, and shares that round down."""
    rest = [0.0] * ((key_size - turning) // 2)
    turns = [*positions.frequencies_of(turning, 10_000.0).tolist(), *rest]
    config = model_config(
        family="causal",
        model_size=key_size,
        attention__num_heads=1,
        embedding__positions="rotary",
        embedding__frequencies=turns if rest else None,
        output__with_bias=False,
    )
    params, _ = _random(config)
    interop.save(tmp_path, config, params, family="gpt_neox")
    said = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert int(key_size * said["partial_rotary_factor"]) == turning
    again = interop.load(tmp_path)
    assert again.config.embedding.frequencies == config.embedding.frequencies
    name = "encoder/layer_0/attention/query"
    np.testing.assert_array_equal(again.params[name]["w"], params[name]["w"])


@pytest.mark.slow
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


@pytest.mark.parametrize("case", ["gemma", "gemma3"])
def test_small_weights_of_norms_of_gemma_are_not_lost_in_half_precision(case, tmp_path):
    folder = small_models.write(tmp_path, case)
    wanted = {
        # About what 1 + x rounds away.
        name: (x * (0.004 if "norm" in name else 1)).astype("bfloat16")
        for name, x in _stored(folder).items()
    }
    arrays.write_safetensors(folder / "model.safetensors", wanted)
    imported = interop.load(folder, dtype="bfloat16")
    scales = [
        (module, x)
        for module, leaves in imported.params.items()
        for name, x in leaves.items()
        if name == "scale"
    ]
    assert len(scales) == sum("norm" in name for name in wanted)
    scale = dict(scales)["encoder/layer_1/norm_1"]
    stored = wanted["model.layers.1.input_layernorm.weight"].astype(float)
    np.testing.assert_allclose(np.asarray(scale, float) - 1, stored, rtol=0, atol=6e-8)
    for module, leaves in imported.params.items():
        for name, x in leaves.items():
            assert x.dtype.name == ("float32" if name == "scale" else "bfloat16"), (
                module
            )
    interop.save(tmp_path / "saved", imported.config, imported.params)
    found = _stored(tmp_path / "saved")
    assert set(found) == set(wanted)
    for name, x in found.items():
        assert x.dtype == wanted[name].dtype
        np.testing.assert_array_equal(x, wanted[name])


def _random(config, num_tokens=7, num_classes=None, feature_size=None):
    """Random parameters of a config's model, and its sizes."""
    sizes = interop.Sizes(num_tokens, feature_size, num_classes or num_tokens)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(generator.standard_normal(x.shape)),
        loading.shapes(config, sizes),
    )
    return params, sizes


def _bert_like(**fields):
    return model_config(
        attention__num_heads=2,
        model_size=8,
        norm__position="post",
        embedding__norm=True,
        **fields,
    )


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("bert", dict(attention=dict(num_heads=0)), "attention.num_heads = 0"),
        ("llama", dict(feed_forward=dict(hidden_size=0)), "hidden_size = 0"),
        ("gpt2", dict(feed_forward=dict(hidden_size=0)), "hidden_size = "),
        ("gemma2", dict(attention=dict(scale=2.0)), "attention.scale = 2.0"),
        ("gemma3", dict(attention=dict(scale=30.0)), "attention.scale = 30.0"),
        ("gemma3", dict(attention=dict(soft_cap=50.0)), "attention.soft_cap = 50.0"),
        ("vit", dict(embedding=dict(image=None)), "embedding.image = None"),
        ("vit", dict(embedding=dict(image=[3, 8, 12, 4])), "embedding.max_length = 5"),
        ("llama", dict(embedding=dict(frequencies=[1, 0.9, 0.2, 0.1])), "these rotary"),
        # GPT-NeoX of transformers reads a share of features that turn, Llama none.
        ("llama", dict(embedding=dict(frequencies=[1, 0.01, 0, 0])), "part of each"),
    ],
)
def test_what_a_family_would_read_otherwise_is_refused(case, fields, reason, tmp_path):
    imported = interop.load(small_models.write(tmp_path, case))
    config = imported.config.replace(**fields)
    sizes = loading.sizes_of(imported.params)
    params, _ = _random(config, *sizes[::2], sizes.feature_size)
    kind = {"gemma3": "gemma3_text"}.get(case, case)
    folder = tmp_path / "saved"
    with pytest.raises(checks.ConfigError, match=f"cannot say.*{reason}"):
        interop.save(folder, config, params, family=kind)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("with_bias", [True, False])
def test_tied_logits_of_fewer_classes_than_tokens(with_bias, tmp_path):
    config = model_config(
        attention__num_heads=2,
        model_size=8,
        norm__position="post",
        embedding__norm=True,
        output=dict(tied=True, with_bias=with_bias, hidden="gelu", norm=True),
    )
    params, sizes = _random(config, 7, 5)
    # Without a bias parameters do not show how many classes there are.
    given = {} if with_bias else {"num_classes": 5}
    with pytest.raises(checks.ConfigError, match="cannot say.* num_classes = 5"):
        interop.save(tmp_path / "bert", config, params, family="bert", **given)
    assert not (tmp_path / "bert").exists()
    model = models.build(config, **sizes._asdict())
    subject = mh.subjects.Subject(model, params, "classes")
    for folder in (
        interop.save(tmp_path / "1", config, params, family="mha_haiku", **given),
        subject.save(tmp_path / "2", family="mha_haiku"),
    ):
        again = interop.load(folder)
        tokens = np.arange(6)[None]
        found = again.model.apply(again.params, None, tokens, is_training=False)
        wanted = model.apply(params, None, tokens, is_training=False)
        np.testing.assert_array_equal(found.logits, wanted.logits)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("attention.sinks = 'learned'", dict(attention=dict(sinks="learned"))),
        ("attention.sinks = 0.5", dict(attention=dict(sinks=0.5))),
        ("attention.gate = 'channel'", dict(attention=dict(gate="channel"))),
        (
            "attention.score = 'sigmoid', attention.normalizer = 'none'",
            dict(attention=dict(score="sigmoid", normalizer="none")),
        ),
        ("attention.temperature = 2.0", dict(attention=dict(temperature=2.0))),
        ("embedding.positions = 'alibi'", dict(embedding=dict(positions="alibi"))),
    ],
)
def test_options_that_no_family_has_are_named_and_our_own_file_holds_them(
    said, fields, tmp_path
):
    imported = interop.load(small_models.write(tmp_path, "llama"))
    config = imported.config.replace(**fields)
    params, _ = _random(config, 31)
    own = tmp_path / "own"
    with pytest.raises(checks.ConfigError) as error:
        interop.save(own, config, params)
    assert f"llama cannot say {said}" in str(error.value)
    assert "family='mha_haiku' writes it" in str(error.value)
    with pytest.raises(checks.ConfigError, match="cannot say.*\n"):
        interop.save(own, config, params, family="llama")
    with pytest.raises(checks.ConfigError, match="family must be one of.*'llama'"):
        interop.save(own, config, params, family="lama")
    interop.save(own, config, params, family="mha_haiku")
    again = interop.load(own)
    assert again.config.to_json() == config.to_json()
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_with_a_decoder_is_in_our_own_file_alone(is_tied, tmp_path):
    config = model_config(
        family="encoder_decoder",
        decoder__num_layers=2,
        model_size=8,
        num_heads=2,
        output__tied=is_tied,
    )
    params, sizes = _random(config, 13, 7)
    assert interop.sizes_of(params) == sizes
    interop.save(tmp_path, config, params, family="mha_haiku")
    loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert loaded.config.decoder.num_layers == 2
    with pytest.raises(checks.ConfigError, match="No family of transformers holds"):
        interop.save(tmp_path / "other", config, params)


def test_parameters_of_another_model_are_refused(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    params = dict(imported.params)
    extra = {**params, "other": {"w": np.zeros(3)}}
    with pytest.raises(checks.ConfigError, match="also have other/w"):
        interop.save(tmp_path / "saved", imported.config, extra)
    del params["encoder/norm"]
    with pytest.raises(checks.ConfigError, match="must have encoder/norm/scale"):
        interop.save(tmp_path / "saved", imported.config, params)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_tokenizers_trained_here_come_back_with_a_model(tmp_path, kind):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    text = "two \n\nlines\r\n and\u2028more, \n"
    trained = tokenization.TRAINERS[kind](text, 260)
    folder, model = tmp_path / "own", (imported.config, imported.params)
    interop.save(folder, *model, tokenizer=trained, family="mha_haiku")
    again = tokenization.read_file(folder / "tokenizer.json")
    for part in (text, text[3:], " \n"):
        tokens = trained.encode(part)
        np.testing.assert_array_equal(again.encode(part), tokens)
        assert again.decode(tokens) == part
    interop.save(folder, *model, family="mha_haiku")
    assert interop.load(folder).tokenizer is None


def test_a_run_is_not_overwritten(tmp_path, make_config):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    run = write_untrained(tmp_path / "run", make_config())
    with pytest.raises(checks.ConfigError, match="run holds a run"):
        interop.save(run, imported.config, imported.params)
    assert folders.load_run(run).step == 3


def test_tokenizers_go_along(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    own = tokenization.Characters.train("abc", 10)
    with pytest.raises(checks.ConfigError, match="characters has no tokenizer.json"):
        interop.save(tmp_path / "s", imported.config, imported.params, tokenizer=own)
    assert not (tmp_path / "s").exists()
