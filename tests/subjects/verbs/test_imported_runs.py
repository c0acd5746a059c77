"""Imported models are runs like any other."""

import shutil

import jax
import numpy as np
import pytest

from mha_haiku import interop, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects import imported_runs
from tests import pretrained, tiny_models
from tests.interop import small_models
from tests.training.runs import faults


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The path of a text in a few words."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(pretrained.text())
    return str(path)


def _written(folder, case):
    """Returns the folder of a tiny model, with a tokenizer of few words."""
    folder.mkdir()
    small_models.write(folder, case)
    pretrained.words().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_runs_learn_and_divide_their_heads(text, tmp_path):
    source = _written(tmp_path / "source", "bert")
    whole, divided = tmp_path / "run", tmp_path / "heads"
    config = imported_runs.write(source, whole, sequence_length=9, path=text).config
    shutil.copytree(whole, divided)
    config = config.replace(
        optimizer=dict(learning_rate=0.01, warmup_steps=1),
        training=dict(
            steps=6,
            batch_size=6,
            steps_per_dispatch=2,
            report_every=1,
            evaluate_every=6,
            evaluation_examples=6,
            checkpoint_every=6,
        ),
    )
    faults.train(config, whole, devices=1)
    reports = faults.reports(whole)
    assert reports[-1]["loss"] < 0.9 * reports[0]["loss"]
    config = config.replace(devices=dict(heads=2))
    faults.train(config, divided, devices=2)
    found = faults.reports(divided)
    # The first is of the imported parameters, the others are of Adam's.
    np.testing.assert_allclose(found[0]["loss"], reports[0]["loss"], rtol=1e-5)
    for name in ("loss", "gradient_norm"):
        both = [[report[name] for report in each] for each in (found, reports)]
        np.testing.assert_allclose(*both, rtol=1e-3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("bert_classes", "gives 7 classes: there is no task for it"),
        ("bert_tokens", "gives 7 classes: there is no task for it"),
    ],
)
def test_models_without_a_task_are_no_runs(case, message, text, tmp_path):
    source = _written(tmp_path / "source", case)
    with pytest.raises(ConfigError, match=message) as refusal:
        imported_runs.write(source, tmp_path / "run", path=text)
    assert len(str(refusal.value).splitlines()) == 2
    assert not (tmp_path / "run").exists()


def test_models_of_features_are_no_runs(text, tmp_path):
    config = tiny_models.config()
    sizes = interop.Sizes(num_tokens=None, feature_size=3, num_classes=2)
    model = models.build(config, **sizes._asdict())
    params = model.init(jax.random.key(0), np.zeros((1, 2, 3), np.float32))
    source = interop.save(tmp_path / "source", config, params)
    with pytest.raises(ConfigError, match="reads features.*: there is no task for it"):
        imported_runs.write(source, tmp_path / "run", path=text)


def test_models_that_restore_tokens_need_a_token_that_hides(text, tmp_path):
    source = _written(tmp_path / "source", "bert")
    file = source / "tokenizer.json"
    file.write_text(file.read_text().replace("[MASK]", "[HIDE]"))
    with pytest.raises(ConfigError, match=r"its tokenizer has no \[MASK\]"):
        imported_runs.write(source, tmp_path / "run", path=text)


def test_texts_without_sentences_are_refused_before_anything_is_made(tmp_path):
    source = _written(tmp_path / "source", "bert_sentences")
    (tmp_path / "words").write_text("cat " * 200)
    with pytest.raises(ConfigError, match="path must have sentences in its held-out"):
        imported_runs.write(source, tmp_path / "run", path=str(tmp_path / "words"))
    assert not (tmp_path / "run").exists()
