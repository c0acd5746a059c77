"""The folder of a run, and what comes back from it."""

import json
import shutil

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import optimizers, train_step
from mha_haiku.training.runs import checkpoints, configuration, files, folders
from tests import tiny_runs


def test_unusable_workdir_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "under"):
        with pytest.raises(ConfigError, match="workdir .* cannot be written: "):
            folders.check_free(path)
    monkeypatch.setattr(files.os, "access", lambda *_: False)  # root writes anywhere
    with pytest.raises(ConfigError, match="workdir .* cannot be written: Permission"):
        folders.check_free(tmp_path)


@pytest.mark.parametrize(
    ("workdir", "wanted"),
    [
        *(("a/sort", "a/sort_new"), ("a/sort/", "a/sort_new")),
        *((".", "here_new"), ("..", "above_new"), ("./a/..", "here_new")),
    ],
)
def test_a_folder_beside_has_the_name_of_the_run(
    workdir, wanted, tmp_path, monkeypatch
):
    here = tmp_path / "above" / "here"
    (here / "below").mkdir(parents=True)
    (here / "a").mkdir()
    monkeypatch.chdir(here)
    found = files.beside(workdir, "_new")
    parents = {"here_new": here.parent, "above_new": tmp_path}
    assert here / found == parents.get(wanted, here) / wanted


def test_config_file_says_what_the_run_ran_with(tmp_path, make_config):
    folder = folders.Folder(tmp_path)
    assert folders.read_config(folder) is None
    config = make_config()
    folders.write_config(folder, config, jax.local_devices()[:2])
    assert folders.read_config(folder) == config
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
    state = folders.abstract_state(config, task, folders.make_model(config.model, task))
    states = {
        step: jax.tree.map(lambda x, s=step: np.full(x.shape, s, x.dtype), state)
        for step in (4, 8)
    }
    folders.write_config(folder, config, jax.local_devices())
    for step, each in states.items():
        checkpoints.save(folder.checkpoints, step, each)
    for wanted, step in ((8, None), (4, 4)):
        loaded = folders.load_run(tmp_path, step)
        assert loaded.step == wanted
        assert loaded.config.to_json() == config.to_json()
        assert loaded.task == task
        found, params = loaded.params, states[wanted].params
        jax.tree.map(np.testing.assert_array_equal, found, params)
    with pytest.raises(ConfigError, match="no checkpoint of step 5 .*: 4, 8"):
        folders.load_run(tmp_path, 5)


@pytest.mark.slow
def test_run_of_parameters_alone_trains_as_from_a_fresh_state(tmp_path, make_config):
    config = make_config(
        training__steps=4, training__checkpoint_every=4, optimizer__warmup_steps=1
    )
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task)
    start = folders.abstract_state(config, task, model)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.01, x.dtype), start.params)
    folder = folders.Folder(folders.write_run(tmp_path / "alone", config, params, task))
    stored = checkpoints.newest(folder.checkpoints).arrays()
    assert not any(name.startswith(".optimizer_state") for name in stored)
    loaded = folders.load_run(folder.root)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    # The same as a whole state.
    whole = folders.Folder(tmp_path / "whole")
    transformation = optimizers.make(config.optimizer, steps=4)
    state = train_step.state_of(params, transformation)
    state = jax.tree.map(np.asarray, state)
    checkpoints.save(whole.checkpoints, 0, state)
    folders.write_config(whole, config, jax.local_devices(), task)
    ends = []
    for each in (folder, whole):
        runs.train(config, each.root, devices=jax.local_devices()[:1])
        ends.append(folders.load_run(each.root).params)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    with pytest.raises(ConfigError, match="alone holds a run; give an empty folder"):
        folders.write_run(folder.root, config, params, task)


@pytest.mark.parametrize(("seeds", "is_read"), [(1, True), (5, False)])
def test_a_config_of_0_2_is_read_unless_it_is_of_several_seeds(
    tmp_path, make_config, seeds, is_read
):
    folder = folders.Folder(tmp_path)
    folders.write_config(folder, make_config(), jax.local_devices()[:1])

    def older(contents):
        contents["directory"] = "/home"
        contents["config"]["training"] |= {"seeds": seeds, "max_skips": 10}
        contents["config"]["devices"]["data"] = None
        del contents["config"]["model"]["output"]["tied"]

    _rewrite(folder, older)
    if is_read:
        assert folders.read_config(folder) == make_config()
        return
    with pytest.raises(
        ConfigError, match="has no field 'seeds'.*\n.* python -m mha_haiku train --conf"
    ):
        folders.read_config(folder)


def _rewrite(folder, change):
    contents = json.loads(folder.config.read_text())
    change(contents)
    folder.config.write_text(json.dumps(contents))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, make_config):
    root = tmp_path_factory.mktemp("runs") / "untrained"
    return tiny_runs.write_untrained(root, make_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("config"), "config.task.name is missing"),
        (lambda x: x.update(form=3), "form 3 of a newer"),
        (lambda x: x["config"].update(task=[]), "config.task.name is missing"),
        (lambda x: x["config"].update(model=None), "config.model must be a section"),
        (lambda x: x["config"]["training"].update(steps=0), "training.steps must be"),
        (
            lambda x: x["config"]["task"].update(sequence_length=10**5),
            "max_length must be at",
        ),
        (lambda x: x["config"]["model"].update(model_size=10**5), "has the shape"),
    ],
)
def test_a_config_that_does_not_fit_is_a_mistake(untrained, tmp_path, change, message):
    folder = folders.Folder(shutil.copytree(untrained, tmp_path / "copy"))
    _rewrite(folder, change)
    with pytest.raises(ConfigError, match=message) as raised:
        folders.load_run(folder.root)
    assert len(str(raised.value).splitlines()) <= 2
