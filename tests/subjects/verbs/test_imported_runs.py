"""Imported models are runs like any other."""

import jax
import numpy as np
import pytest

from mha_haiku import interop, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects import imported_runs
from tests import pretrained, tiny_models
from tests.interop import small_models


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
    with pytest.raises(ConfigError, match="path must have sentences in its"):
        imported_runs.write(source, tmp_path / "run", path=str(tmp_path / "words"))
    assert not (tmp_path / "run").exists()
