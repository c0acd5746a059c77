"""Whole runs: what they leave, and that stopping them at any point costs nothing."""

import json
import threading

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import checkpoints, folders, metrics_log, trainers
from tests.training.runs import faults


def _assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_run_leaves_its_folder(whole, make_config):
    folder, state = whole
    config = make_config()
    assert state.step == 30
    assert folders.read_config(folders.Folder(folder)) == config
    assert {20, 30} <= {*checkpoints.steps(folder / "checkpoints")} <= {10, 20, 30}
    reports = metrics_log.read(folder / "metrics.jsonl")
    assert [x["step"] for x in reports] == [5, 10, 15, 20, 25, 30]
    evaluated = [x["step"] for x in reports if "held_out_loss" in x]
    assert evaluated == [10, 20, 30]
    assert all(
        {"loss", "accuracy", "gradient_norm", "examples_per_second"} < set(x)
        for x in reports
    )
    assert reports[-1]["loss"] < reports[0]["loss"]
    optimizer = config.optimizer
    final = optimizer.learning_rate * optimizer.final_learning_rate_fraction
    assert reports[-1]["learning_rate"] == pytest.approx(final)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 30 and not summary["interrupted"]
    assert summary["metrics"] == {
        name: reports[-1][name] for name in summary["metrics"]
    }
    assert len(summary["metrics"]) == len(reports[-1]) - 3  # step, rate and seconds
    assert summary["baseline"]["accuracy"] == 1 / 5
    assert summary["wall_seconds"] > summary["compile_seconds"] > 0
    assert summary["examples_per_second"] == 8 * summary["steps_per_second"] > 0


def test_ended_run_is_left_as_it_is(whole, make_config, capsys):
    folder, _ = whole
    paths = [*folder.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in paths}
    summary = faults.train(make_config(), folder)
    assert "has ended at step 30" in capsys.readouterr().out
    assert summary == runs.Summary(**json.loads((folder / "summary.json").read_text()))
    assert {path: path.stat().st_mtime_ns for path in paths} == before


def test_summary_that_a_kill_prevented_is_made_up_for(copy, make_config):
    before = json.loads((copy / "summary.json").read_text())["metrics"]
    (copy / "summary.json").unlink()
    summary = faults.train(make_config(), copy)
    assert summary.metrics == before
    assert not summary.interrupted
    reports = metrics_log.read(copy / "metrics.jsonl")
    assert [x["step"] for x in reports] == [5, 10, 15, 20, 25, 30]


@pytest.mark.slow
def test_an_interrupted_compilation_leaves_nothing(make_config, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainers, "Trainer", interrupt)
    for root in (tmp_path / "a" / "b", tmp_path):
        with pytest.raises(KeyboardInterrupt):
            faults.train(make_config(), root)
        assert not [*tmp_path.iterdir()]


class _Observer(runs.Observer):
    """Notes where it looks."""

    def begin(self, folder, config, task, step):
        self.seen, self.is_over = [("begin", step, folder.root.name)], False

    def look(self, step, params):
        self.seen.append((step, float(sum(x.sum() for x in jax.tree.leaves(params)))))

    def end(self):
        self.is_over = True


@pytest.mark.slow
def test_observers_look_when_they_are_due(whole, make_config, tmp_path, monkeypatch):
    first, second, never = _Observer(7), _Observer(15), _Observer(0)
    looks = []
    function = runs.Observer(30, lambda step, params: looks.append(step))
    observers = [first, never, second, function]
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(14))
        faults.train(make_config(), tmp_path, observers=observers)
    assert first.seen[0] == ("begin", 0, tmp_path.name)
    assert [x[0] for x in first.seen[1:]] == [0, 7, 14]
    assert first.is_over and not hasattr(never, "seen")
    faults.train(make_config(), tmp_path, observers=observers)
    assert first.seen[0] == ("begin", 14, tmp_path.name)
    assert [x[0] for x in first.seen[1:]] == [14, 21, 28, 30]
    assert [x[0] for x in second.seen[1:]] == [15, 30]
    assert looks == [0, 30]
    assert first.seen[-1] == second.seen[-1] != first.seen[-2]
    # Who looks changes nothing.
    _assert_equal(faults.state(tmp_path, make_config()), whole[1])


@pytest.mark.slow
def test_other_config_is_refused_with_the_difference(
    make_config, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(14))
        faults.train(make_config(), tmp_path)
    changed = make_config(training__report_every=6, training__evaluate_every=16)
    message = "config.training.report_every: 5 -> 6; .*evaluate_every: 10 -> 16"
    with pytest.raises(ConfigError, match=message) as refusal:
        faults.train(changed, tmp_path)
    assert len(str(refusal.value).splitlines()) <= 2
    summary = faults.train(changed, tmp_path, override_config=True)
    assert (summary.resumed_from, summary.steps) == (14, 30)
    saved = folders.read_config(folders.Folder(tmp_path))
    assert saved == changed
    reports = metrics_log.read(tmp_path / "metrics.jsonl")
    assert [x["step"] for x in reports] == [5, 10, 16, 18, 20, 24, 30]

    shorter = make_config(training__steps=25)
    with pytest.raises(ConfigError, match="at least the 30 steps .* got 25"):
        faults.train(shorter, tmp_path, override_config=True)
    wider = make_config(training__steps=40, model__hidden_size=13)
    with pytest.raises(ConfigError, match=r"has the shape .*12.*13"):
        faults.train(wider, tmp_path, override_config=True)
    assert folders.read_config(folders.Folder(tmp_path)) == saved


def test_many_differences_are_still_two_lines(whole, make_config):
    changed = make_config(seed=4, **{f"optimizer__b{i}": 0.5 for i in (1, 2)}).replace(
        training=dict(report_every=2, evaluate_every=3, checkpoint_every=7)
    )
    with pytest.raises(ConfigError, match="and 2 more") as refusal:
        faults.train(changed, whole[0])
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.slow
def test_threads_train_too(whole, make_config, tmp_path):
    thread = threading.Thread(target=faults.train, args=(make_config(), tmp_path))
    thread.start()
    thread.join()
    _assert_equal(faults.state(tmp_path, make_config()), whole[1])


def test_bad_config_touches_nothing(make_config, tmp_path):
    with pytest.raises(ConfigError, match="multiple of the 2 devices"):
        faults.train(make_config(training__batch_size=5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
