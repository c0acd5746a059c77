"""The folder of a run, and what comes back from it."""

import json

import jax
import numpy as np
import pytest

from mha_haiku.checks import ConfigError
from mha_haiku.runs import checkpoints, configuration, folders


def test_folder_is_made(tmp_path):
    folder = folders.open_folder(tmp_path / "a" / "b")
    assert folder.root.is_dir()
    assert folder.config == tmp_path / "a" / "b" / "config.json"


def test_unusable_workdir_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "under"):
        with pytest.raises(ConfigError, match="workdir must be a folder, but .* file"):
            folders.open_folder(path)
    monkeypatch.setattr(
        folders.os, "access", lambda *_: False
    )  # root may write anywhere
    with pytest.raises(ConfigError, match="workdir .* must be writable"):
        folders.open_folder(tmp_path)


def test_checkpoints_without_a_config_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has checkpoints but no config.json"):
        folders.open_folder(tmp_path)


def test_config_file_says_what_the_run_ran_with(tmp_path, make_config):
    folder = folders.Folder(tmp_path)
    assert folders.read_config(folder) is None
    config = make_config()
    folders.write_config(folder, config, jax.local_devices()[:2])
    assert folders.read_config(folder) == configuration.to_json(config)
    contents = json.loads(folder.config.read_text())
    assert contents["seed"] == 3
    assert contents["versions"]["jax"] == jax.__version__
    assert {"jaxlib", "haiku"} < set(contents["versions"])
    assert len(contents["devices"]) == 2
    assert "git_commit" in contents


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seed": 3}', "\xff"])
def test_broken_config_file_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        folders.read_config(folders.Folder(tmp_path))


def test_run_comes_back_from_its_folder(tmp_path, make_config):
    folder, config = folders.Folder(tmp_path), make_config()
    task = configuration.make_task(config)
    state = folders.abstract_state(config, task, folders.make_model(config, task))
    states = {
        step: jax.tree.map(lambda x, s=step: np.full(x.shape, s, x.dtype), state)
        for step in (4, 8)
    }
    folders.write_config(folder, config, jax.local_devices())
    with checkpoints.Checkpoints(folder.checkpoints) as stored:
        for step, each in states.items():
            stored.save(step, each)
    for wanted, step in ((8, None), (4, 4)):
        loaded = folders.load_run(tmp_path, step)
        assert loaded.step == wanted
        assert configuration.to_json(loaded.config) == configuration.to_json(config)
        assert loaded.task == task
        found, params = loaded.params, states[wanted].params
        jax.tree.map(np.testing.assert_array_equal, found, params)
    with pytest.raises(ConfigError, match="no checkpoint of step 5 .*: 4, 8"):
        folders.load_run(tmp_path, 5)


def test_missing_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no run in .*nowhere"):
        folders.load_run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
