"""Saved models come back unchanged; test_parity.py opens them in `transformers`."""

import json

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, interop, models
from mha_haiku.core import arrays, checks, sites
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
    interop.save(after, imported.config, imported.params)
    found, wanted = _stored(after), _stored(before)
    unread = {x for x in wanted if "pooler" in x or "seq_relationship" in x}
    if not case.endswith("classes"):
        wanted = {name: x for name, x in wanted.items() if name not in unread}
    assert set(found) == set(wanted)
    if case == "bert_untied":  # which has a second bias that is read
        wanted["cls.predictions.bias"] = wanted["cls.predictions.decoder.bias"]
    for name, x in found.items():
        if "roberta" in case and "position_embeddings" in name:
            x, wanted[name] = x[2:], wanted[name][2:]  # rows of no position
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=2e-7)
    texts = [json.loads((x / "config.json").read_text()) for x in (before, after)]
    del texts[1][loading.FILES]
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
    if imported.config.attention.qk_norm_over == "layer":  # its heads share a norm
        with pytest.raises(ValueError, match="Ablate the head instead"):
            heads.prune(imported.params, imported.config, keep)
        return
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


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("llama", dict(num_layers=1), "num_layers = 1 for 2"),
        ("gpt2", dict(attention=dict(scale=2.0)), "attention.scale = 2.0 for 0.4"),
        ("gemma3", dict(attention=dict(window=None)), "attention.window = None for"),
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


@pytest.mark.parametrize("with_bias", [True, False])
def test_tied_logits_of_fewer_classes_than_tokens(with_bias, tmp_path):
    config = model_config(
        attention__num_heads=2,
        model_size=8,
        output=dict(tied=True, with_bias=with_bias, hidden="gelu", norm=True),
    )
    params, sizes = _random(config, 7, 5)
    # Without a bias parameters do not show how many classes there are.
    options = {} if with_bias else {"num_classes": 5}
    if not with_bias:
        with pytest.raises(checks.ConfigError, match="num_classes must be given"):
            interop.save(tmp_path / "1", config, params)
    model = models.build(config, **sizes._asdict())
    subject = mh.subjects.Subject(model, params, "classes")
    for folder in (
        interop.save(tmp_path / "1", config, params, **options),
        subject.save(tmp_path / "2"),
    ):
        again = interop.load(folder)
        tokens = np.arange(6)[None]
        found = again.model.apply(again.params, None, tokens, is_training=False)
        wanted = model.apply(params, None, tokens, is_training=False)
        np.testing.assert_array_equal(found.logits, wanted.logits)


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
    del params["encoder/norm"]
    message = "it lacks encoder/norm/offset, encoder/norm/scale"
    with pytest.raises(checks.ConfigError, match=message):
        interop.save(tmp_path / "saved", imported.config, params)
    more = {"embeddings": np.zeros((33, 24), np.float32)}  # two words more
    params = {**imported.params, "embedding": more}
    with pytest.raises(checks.ConfigError, match=r"of shape \(31, 24\), got \(33, 24"):
        interop.save(tmp_path / "saved", imported.config, params)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_tokenizers_trained_here_come_back_with_a_model(tmp_path, kind):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    text = "two \n\nlines\r\n and\u2028more, \n"
    trained = tokenization.TRAINERS[kind](text, 260)
    folder, model = tmp_path / "own", (imported.config, imported.params)
    interop.save(folder, *model, tokenizer=trained, own_layout=True)
    again = tokenization.read_file(folder / "tokenizer.json")
    for part in (text, text[3:], " \n"):
        tokens = trained.encode(part)
        np.testing.assert_array_equal(again.encode(part), tokens)
        assert again.decode(tokens) == part
    interop.save(folder, *model, own_layout=True)
    assert interop.load(folder).tokenizer is None


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.safetensors", "README.md", ".git"]
)
def test_files_of_others_stay(name, tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    folder = tmp_path / "own"
    saved = interop.save(folder, imported.config, imported.params)
    interop.save(saved, imported.config, imported.params)  # its own are replaced
    (folder / ".model.safetensors.7.partial").write_text("of a killed process")
    interop.save(saved, imported.config, imported.params, own_layout=True)
    if name == "README.md":  # next to what save wrote
        (folder / name).write_text("mine")
    else:
        folder = tmp_path / "theirs"
        folder.mkdir()
        (folder / name).write_text("mine")
    with pytest.raises(checks.ConfigError, match=f"holds {name}, which save did not"):
        interop.save(folder, imported.config, imported.params)
    assert (folder / name).read_text() == "mine"


def test_downloaded_models_and_runs_are_not_overwritten(tmp_path, make_config):
    downloaded = small_models.write(tmp_path, "gpt2")
    imported = interop.load(downloaded)
    run = write_untrained(tmp_path / "run", make_config())
    (tmp_path / "list.json").write_text("[]")
    file = tmp_path / "file"
    file.write_text("mine")
    for folder, message in (
        (downloaded, "holds config.json"),
        (run, "holds checkpoints, config.json"),
        (file, "must be a folder, got the file"),
    ):
        with pytest.raises(checks.ConfigError, match=message):
            interop.save(folder, imported.config, imported.params)
    assert interop.load(downloaded).config == imported.config
    assert folders.load_run(run).step == 3


def test_a_save_that_is_killed_can_be_done_again(tmp_path, monkeypatch):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    model, folder = (imported.config, imported.params), tmp_path / "saved"
    interop.save(folder, *model)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(arrays, "write_safetensors", killed)
        interop.save(folder, *model)
    with pytest.raises(checks.ConfigError, match="has no model.safetensors"):
        interop.load(folder)
    assert interop.load(interop.save(folder, *model)).config == imported.config


def test_tokenizers_go_along(tmp_path):
    imported = interop.load(small_models.write(tmp_path, "gpt2"))
    own = tokenization.Characters.train("abc", 10)
    with pytest.raises(checks.ConfigError, match="characters has no tokenizer.json"):
        interop.save(tmp_path / "s", imported.config, imported.params, tokenizer=own)
    assert not (tmp_path / "s").exists()
