"""A run keeps its tokenizer and knows its text."""

import json
import pydoc_data.topics
import shutil

import jax
import numpy as np
import pytest

from mha_haiku import runs, subjects
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import folders
from mha_haiku.training.tasks import tokenization

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
CHANGED = TEXT.replace("quick", "quack", 1)


def _config(path, tokenizer="characters"):
    config = runs.default_config("language_model").replace(
        task=dict(sequence_length=12),
        data=dict(path=str(path), tokenizer=tokenizer, vocabulary_size=270),
        model=dict(
            family="causal",
            model_size=8,
            attention=dict(num_heads=2, key_size=4),
            feed_forward=dict(hidden_size=8),
        ),
        optimizer=dict(warmup_steps=1),
        training=dict(steps=4, batch_size=4, evaluation_examples=8, checkpoint_every=2),
    )
    return config


def _train(config, workdir, **options):
    return runs.train(config, workdir, devices=jax.local_devices()[:1], **options)


@pytest.fixture(scope="module", params=["characters", "bpe"])
def trained(request, tmp_path_factory):
    """A run of four steps, and its text."""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "text.txt"
    path.write_text(TEXT)
    _train(_config(path, request.param), folder / "run")
    return folder / "run", path


@pytest.fixture
def path(trained):
    """The text, which is put back after the test."""
    yield trained[1]
    trained[1].write_text(TEXT)


def _maps(run):
    return subjects.Subject.of_run(run, "run").maps("a quick dog")


def _unfinished(trained, tmp_path):
    """Copies a run as a kill after its first checkpoint leaves it."""
    shutil.copytree(trained[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "4")
    (tmp_path / "copy" / "summary.json").unlink()
    return tmp_path / "copy"


@pytest.mark.slow
def test_text_of_ones_own_needs_no_other(trained, path):
    before = runs.load(trained[0])
    tokens, maps = before.task.encode("a quick dog"), _maps(before)
    path.unlink()
    run = runs.load(trained[0])
    np.testing.assert_array_equal(run.task.encode("a quick dog"), tokens)
    assert [run.task.class_label(int(token)) for token in tokens] == [
        before.task.class_label(int(token)) for token in tokens
    ]
    for one, other in zip(_maps(run), maps, strict=True):
        np.testing.assert_array_equal(one.weights(), other.weights())
    with pytest.raises(ConfigError, match="path .* cannot be read: No such file"):
        run.examples(2)


@pytest.mark.slow
def test_text_that_changed_is_refused_where_it_is_needed(trained, path, tmp_path):
    path.write_text(CHANGED)
    run = runs.load(trained[0])
    _maps(run)
    with pytest.raises(ConfigError, match="has learned from other data") as refusal:
        run.examples(2)
    assert len(str(refusal.value).splitlines()) == 2 and path.name in str(refusal.value)


@pytest.mark.slow
def test_resuming_with_another_text_is_refused_unless_told(trained, path, tmp_path):
    workdir = _unfinished(trained, tmp_path)
    folder, config = folders.Folder(workdir), runs.load(workdir).config
    before = folder.tokenizer.read_bytes()
    path.write_text("THE " + CHANGED)  # letters that the run does not know
    with pytest.raises(ConfigError, match="has learned from other data"):
        _train(config, workdir)
    assert _train(config, workdir, override_config=True).resumed_from == 2
    assert folder.tokenizer.read_bytes() == before  # in the same tokens
    assert runs.load(workdir).examples(2).inputs.shape == (2, 12)


@pytest.mark.slow
def test_topics_of_another_python_are_named(tmp_path, monkeypatch):
    config = _config("")
    _train(config, tmp_path)
    monkeypatch.setitem(pydoc_data.topics.topics, "zzz", "new in this version")
    run = runs.load(tmp_path)
    message = "pydoc_data.topics of Python 3.* had the sha256 .* Python 3.* has"
    with pytest.raises(ConfigError, match=message):
        run.examples(1)


@pytest.mark.slow
def test_tokenizer_is_json_that_other_tools_read(trained):
    import tokenizers

    text = folders.Folder(trained[0]).tokenizer.read_text()
    task = runs.load(trained[0]).task
    if "characters" in json.loads(text):
        assert set(json.loads(text)["characters"]) == set(TEXT)
    else:
        described = json.dumps(json.loads(text)["pretrained"])
        other = tokenizers.Tokenizer.from_str(described)
        assert other.encode("a quick dog").ids == task.encode("a quick dog").tolist()
    again = tokenization.from_json(text)
    np.testing.assert_array_equal(again.encode(TEXT), task.encoder.encode(TEXT))


def test_a_run_finds_its_text_from_any_working_directory(tmp_path, monkeypatch):
    (home := tmp_path / "home").mkdir()
    monkeypatch.chdir(home)
    (home / "text.txt").write_text(TEXT)
    _train(_config("text.txt"), "run")
    held_out = runs.load("run").task.held_out_data
    monkeypatch.chdir(tmp_path)
    run = runs.load("home/run")
    np.testing.assert_array_equal(run.task.held_out_data, held_out)
    assert run.config.data.path == str(home / "text.txt")
    monkeypatch.chdir(home)
    assert _train(_config("text.txt"), "run").steps == 4  # the same run
