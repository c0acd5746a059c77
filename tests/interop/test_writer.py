"""Saved models come back unchanged; test_parity.py opens them in `transformers`."""

import json

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, interop, models
from mha_haiku.core import arrays, checks, sites
from mha_haiku.interop import loader
from mha_haiku.training.tasks import tokenization
from tests import everyday, pretrained, tiny_models
from tests.interop import small_models
from tests.tiny_runs import model_config


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
    interop.save(after, imported.config, imported.params)
    found, wanted = _stored(after), _stored(before)
    unread = {x for x in wanted if "pooler" in x or "seq_relationship" in x}
    if not case.endswith("classes"):
        wanted = {name: x for name, x in wanted.items() if name not in unread}
    assert set(found) == set(wanted)
    if case == "bert_untied":  # which has a second bias that is read
        wanted["cls.predictions.bias"] = wanted["cls.predictions.decoder.bias"]
    for name, x in found.items():
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=2e-7)
    texts = [json.loads((x / "config.json").read_text()) for x in (before, after)]
    assert texts[0] == texts[1]
    again = interop.load(after)
    assert again.config == imported.config
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=3e-7),
        again.params,
        imported.params,
    )


@pytest.mark.parametrize("case", everyday.some(small_models.CASES, 3))
def test_pruned_models_equal_gated_ones_and_are_saved_with_zeros(
    case, tmp_path, caplog
):
    imported = interop.load(small_models.write(tmp_path, case))
    num_heads = imported.config.attention.num_heads
    keep = np.ones((2, num_heads), bool)
    keep[0, 1] = keep[1, 0] = keep[1, 2] = False
    params, config = heads.prune(imported.params, imported.config, keep)
    whole = interop.load(interop.save(tmp_path / "whole", config, params))
    assert "3 pruned heads are written with weights of 0" in caplog.text
    assert whole.config == imported.config
    small = interop.load(
        interop.save(tmp_path / "small", config, params, own_layout=True)
    )
    assert small.config == config
    jax.tree.map(np.testing.assert_array_equal, small.params, params)
    gated = sites.edit(imported.model.apply, heads.edits.gate(1.0 * keep))

    @jax.jit
    def run(gated_params, whole_params, small_params):
        arguments = None, small_models.inputs()
        options = {"lengths": small_models.LENGTHS, "is_training": False}
        return [
            apply(params, *arguments, **options).output
            for apply, params in (
                (gated, gated_params),
                (whole.model.apply, whole_params),
                (small.model.apply, small_params),
            )
        ]

    wanted, *others = run(imported.params, whole.params, small.params)
    for found in others:
        small_models.assert_close(
            small_models.valid(found, 1), small_models.valid(wanted, 1)
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_scanned_layers_save_as_they_are(dtype, tmp_path):
    folder = small_models.write(tmp_path, "qwen2")
    imported = interop.load(folder, dtype=dtype)
    assert {x.dtype.name for x in jax.tree.leaves(imported.params)} == {dtype}
    stacked = models.stacked(imported.params)
    scanned = imported.config.replace(scan_layers=True)
    interop.save(tmp_path / "saved", scanned, stacked)
    found = _stored(tmp_path / "saved")
    wanted = _stored(folder)
    assert set(found) == set(wanted)
    for name, x in found.items():
        assert x.dtype.name == dtype
        np.testing.assert_array_equal(x, wanted[name].astype(x.dtype))
    # What is stored in half precision loads as float32, too.
    whole = interop.load(tmp_path / "saved").params
    for x, y in zip(*map(jax.tree.leaves, (whole, imported.params)), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, y.astype(np.float32))


def test_small_weights_of_norms_of_gemma_are_not_lost_in_half_precision(tmp_path):
    folder = small_models.write(tmp_path, "gemma")
    wanted = {
        # About what 1 + x rounds away.
        name: (x * (0.004 if "norm" in name else 1)).astype("bfloat16")
        for name, x in _stored(folder).items()
    }
    arrays.write_safetensors(folder / "model.safetensors", wanted)
    imported = interop.load(folder, dtype="bfloat16")
    leaves = loader.flat(imported.params)
    dtypes = {(name.endswith("scale"), x.dtype.name) for name, x in leaves.items()}
    assert dtypes == {(True, "float32"), (False, "bfloat16")}
    scale = leaves["encoder/layer_1/norm_1/scale"]
    stored = wanted["model.layers.1.input_layernorm.weight"].astype(float)
    np.testing.assert_allclose(np.asarray(scale, float) - 1, stored, rtol=0, atol=6e-8)
    interop.save(tmp_path / "saved", imported.config, imported.params)
    found = _stored(tmp_path / "saved")
    assert set(found) == set(wanted)
    for name, x in found.items():
        assert x.dtype == wanted[name].dtype
        np.testing.assert_array_equal(x, wanted[name])


def _random(config, num_tokens=7, num_classes=None, feature_size=None):
    """Random parameters of a config's model, and its sizes."""
    sizes = interop.Sizes(num_tokens, feature_size, num_classes or num_tokens)
    return tiny_models.normal(loader.shapes(config, sizes)), sizes


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("llama", dict(num_layers=1), "num_layers = 1 for 2"),
        ("gpt2", dict(attention=dict(scale=2.0)), "attention.scale = 2.0 for 0.4"),
        ("mistral", dict(attention=dict(window=None)), "attention.window = None for"),
        ("bert", dict(embedding=dict(segments=0)), "embedding.segments = 0 for 5"),
        ("llama", dict(embedding=dict(positions="alibi")), "'alibi' for 'rotary'"),
    ],
)
def test_a_config_that_is_not_that_of_the_file_is_refused(
    case, fields, reason, tmp_path
):
    imported = interop.load(small_models.write(tmp_path, case))
    config = imported.config.replace(**fields)
    params, _ = _random(config, 31)
    folder = tmp_path / "saved"
    with pytest.raises(checks.ConfigError, match=f"{reason}.*\n.*own_layout=True"):
        interop.save(folder, config, params)
    assert not folder.exists()
    interop.save(folder, config, params, own_layout=True, num_classes=31)
    again = interop.load(folder)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_tied_logits_of_fewer_classes_than_tokens(tmp_path):
    output = dict(tied=True, with_bias=False, hidden="gelu", norm=True)
    config = model_config(attention__num_heads=2, model_size=8, output=output)
    params, sizes = _random(config, 7, 5)
    # Without a bias parameters do not show how many classes there are.
    with pytest.raises(checks.ConfigError, match="num_classes must be given"):
        interop.save(tmp_path, config, params)
    model = models.build(config, **sizes._asdict())
    subject = mh.subjects.Subject(model, params, "classes")
    assert interop.load(subject.save(tmp_path)).model.num_classes == 5


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_with_a_decoder_comes_back(is_tied, tmp_path):
    config = model_config(
        family="encoder_decoder",
        decoder__num_layers=2,
        model_size=8,
        num_heads=2,
        output__tied=is_tied,
    )
    params, sizes = _random(config, 13, 7)
    assert interop.sizes_of(params) == sizes
    interop.save(tmp_path, config, params)
    loaded = interop.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert loaded.config.decoder.num_layers == 2


def test_parameters_of_another_model_are_refused(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    params = dict(imported.params)
    extra = {**params, "other": {"w": np.zeros(3)}}
    with pytest.raises(checks.ConfigError, match="it also has other/w"):
        interop.save(tmp_path / "saved", imported.config, extra)
    more = {"embeddings": np.zeros((33, 24), np.float32)}  # two words more
    params = {**imported.params, "embedding": more}
    with pytest.raises(checks.ConfigError, match=r"of shape \(31, 24\), got \(33, 24"):
        interop.save(tmp_path / "saved", imported.config, params)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_tokenizers_trained_here_come_back_with_a_model(tmp_path, kind):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    text = "two \n\nlines\r\n and\u2028more, \n"
    trained = tokenization.TRAINERS[kind](text, 260)
    model = imported.config, imported.params
    saved = interop.save(tmp_path / "own", *model, tokenizer=trained, own_layout=True)
    again = tokenization.read_file(saved / "tokenizer.json")
    np.testing.assert_array_equal(again.encode(text), trained.encode(text))
    if kind == "characters":  # which no transformers reads
        with pytest.raises(checks.ConfigError, match="has no tokenizer.json"):
            interop.save(tmp_path / "theirs", *model, tokenizer=trained)
        assert not (tmp_path / "theirs").exists()


def test_a_folder_with_files_is_never_written_into(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    folder, file = tmp_path / "theirs", tmp_path / "file"
    folder.mkdir()
    (folder / ".git").write_text("mine")
    file.write_text("mine")
    saved = interop.save(tmp_path / "saved", imported.config, imported.params)
    for path in (folder, file, saved, tmp_path):
        with pytest.raises(checks.ConfigError, match="must be a new or an empty folde"):
            interop.save(path, imported.config, imported.params)
    assert (folder / ".git").read_text() == file.read_text() == "mine"
    assert interop.load(tmp_path).config == imported.config


def test_models_saved_by_earlier_versions_open(tmp_path):
    config, params, *_ = interop.load(small_models.write(tmp_path, "gpt2"))
    folder = interop.save(tmp_path / "own", config, params, own_layout=True)
    contents = json.loads((folder / "config.json").read_text())
    contents["model"] |= models.GONE
    (folder / "config.json").write_text(json.dumps(contents))
    assert interop.load(folder).config == config


@pytest.mark.parametrize("own_layout", [False, True])
def test_all_end_tokens_are_saved(own_layout, tmp_path):
    source = small_models.write(tmp_path, "gpt2")
    pretrained.words().save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    config, params, tokenizer, _ = interop.load(source)
    options = dict(tokenizer=tokenizer, own_layout=own_layout)
    saved = interop.save(tmp_path / "saved", config, params, **options)
    assert interop.load(saved).tokenizer.end_tokens == (3, 7)
