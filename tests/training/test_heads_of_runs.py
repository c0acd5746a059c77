"""Heads of runs: measured, pruned, gated and followed in time, through the folders."""

import csv
import json

import jax
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.checks import ConfigError
from mha_haiku.training import (
    attention_dump,
    gate_learning,
    head_importance,
    head_statistics,
    loop,
    pruned_runs,
    pruning,
    timeline,
)
from mha_haiku.training import run as run_folder

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def _speed_is_measured_briefly(monkeypatch):
    monkeypatch.setattr(pruned_runs, "_TIMED_SECONDS", 0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes the folder of a run that has taken a few steps; one per set of fields."""
    made = {}

    def make(make_config, **fields):
        key = json.dumps(fields)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            loop.train(make_config(**fields), folder, devices=jax.local_devices()[:1])
            made[key] = folder
        return made[key]

    return make


def test_measures_of_a_run_are_written_and_shown(trained, make_config, tmp_path):
    folder = trained(make_config)
    found = head_importance.measure(folder, examples=9, metric="accuracy")
    assert list(found.measures) == list(head_importance.MEASURES)
    assert found.agreement.shape == (4, 4)
    np.testing.assert_allclose(np.diag(found.agreement), 1)
    path = head_importance.write(found, tmp_path / "heads")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(x["layer"], x["head"]) for x in lines] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    mean = found.measures["ablation"].mean
    assert float(lines[2]["ablation"]) == pytest.approx(mean[1, 0], abs=1e-7)
    for line in lines:
        assert float(line["gradient_rank_low"]) <= float(line["gradient_rank_high"])
    assert "9 held-out examples, ablation of the accuracy" in found.title
    assert head_importance.table(found).count("±") == 16


def test_scanned_layers_have_the_importance_of_looped_ones(trained, make_config):
    folder = trained(make_config, model__scan_layers=True)
    found = head_importance.measure(folder, examples=4, measures=["ablation"])
    run = run_folder.load_run(folder)
    params = models.unstacked(run.params)
    looped = head_importance.looped(run)
    jax.tree.map(np.testing.assert_array_equal, looped.params, params)
    assert found.measures["ablation"].mean.shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "los"}, "metric must be one of loss, accuracy.*Did you mean"),
        ({"closing": "nothing"}, "closing must be one of zero, mean, resample"),
        ({"measures": ["gradients"]}, "measures .* Did you mean 'gradient'"),
        ({"examples": 0}, "examples must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(trained, make_config, options, message):
    with pytest.raises(ConfigError, match=message):
        head_importance.measure(trained(make_config), **options)


def test_a_pruned_run_is_a_run(trained, make_config, tmp_path):
    folder = trained(make_config)
    request = pruning.Request(keep=0.5, order="confidence", examples=4)
    found = pruning.prune(folder, request)
    whole, half = found.points
    assert (whole.kept, half.kept) == (4, 2)
    assert half.parameters < whole.parameters and half.ideal_speed_up > 1
    out = pruning.save(found, tmp_path / "pruned", steps=7)
    run = run_folder.load_run(out)
    assert run.step == 7
    names = [layer.names for layer in models.heads_of_layers(run.config.model)]
    assert [list(x) for x in names] == half.keep
    # It is looked at like any other, and its heads keep their names.
    statistics = head_statistics.measure(out, examples=3)
    there = ~np.isnan(statistics.means["entropy"])
    wanted = np.zeros_like(there)
    for layer, heads in enumerate(half.keep):
        wanted[layer, heads] = True
    np.testing.assert_array_equal(there, wanted)
    with np.load(attention_dump.dump(out)) as maps:
        for layer, heads in enumerate(half.keep):
            shown = maps[f"heads_{layer:02d}"].tolist()
            assert shown == [f"head {h}" for h in heads]
            assert maps[f"layer_{layer:02d}"].shape[1] == len(heads)
    with pytest.raises(ConfigError, match="holds a run; give an empty folder"):
        pruning.save(found, out, steps=0)


def test_points_are_the_models_that_they_name(trained, make_config, tmp_path):
    folder = trained(make_config)
    found = pruning.prune(folder, pruning.Request(sweep=True, examples=4))
    assert [point.kept for point in found.points] == [4, 3, 2, 1, 0]
    for before, after in zip(found.points, found.points[1:], strict=False):
        for kept, left in zip(before.keep, after.keep, strict=True):
            assert set(left) <= set(kept)
    run = run_folder.load_run(folder)
    wanted = pruned_runs.held_out(pruned_runs.prune(run, found.points[2].keep))
    assert found.points[2].metrics == wanted
    path = pruning.write(found, tmp_path)
    with path.open(newline="") as file:
        assert [int(line["kept"]) for line in csv.DictReader(file)] == [4, 3, 2, 1, 0]
    assert pruning.table(found).count("\n") > 6
    assert pruning.curve(found)["kept"] == [4, 3, 2, 1, 0]


def test_as_many_heads_go_as_the_accuracy_allows(trained, make_config):
    folder = trained(make_config)
    everything = pruning.prune(folder, pruning.Request(metric_drop=1.0, examples=4))
    assert everything.points[-1].kept == 0
    found = pruning.prune(folder, pruning.Request(metric_drop=0.02, examples=4))
    whole, left = found.points
    assert left.metrics["accuracy"] >= whole.metrics["accuracy"] - 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Give one of sweep, keep and metric_drop"),
        ({"sweep": True, "keep": 0.5}, "Give one of sweep, keep and metric_drop"),
        ({"keep": 1.5}, r"keep must be a number in \[0, 1\], got 1.5"),
        ({"keep": 0.5, "order": "greed"}, "order .* Did you mean 'greedy'"),
        ({"keep": 0.5, "closing": "none"}, "closing must be one of"),
    ],
)
def test_what_is_no_request_is_refused(trained, make_config, fields, message):
    with pytest.raises(ConfigError, match=message):
        pruning.prune(trained(make_config), pruning.Request(**fields))


def test_gates_close_heads_of_a_run(trained, make_config, tmp_path):
    folder = trained(make_config)
    lines = gate_learning.learn(
        folder, tmp_path / "gates", penalty=0.15, steps=70, tuning_steps=5
    )
    whole, before, tuned, scratch = lines
    assert whole.kept == 4 > before.kept == tuned.kept == scratch.kept > 0
    pruned = run_folder.load_run(tmp_path / "gates" / "pruned")
    other = run_folder.load_run(tmp_path / "gates" / "scratch")
    assert (pruned.step, other.step) == (5, 30 + 70 + 5)
    assert pruned.config.model == other.config.model
    assert "pruned and tuned" in gate_learning.table(lines)
    with pytest.raises(ConfigError, match="give a folder without it"):
        gate_learning.learn(
            folder, tmp_path / "gates", penalty=0.3, steps=1, tuning_steps=1
        )
    with pytest.raises(ConfigError, match="closes every head; give a smaller one"):
        gate_learning.learn(
            folder, tmp_path / "none", penalty=1e3, steps=40, tuning_steps=1
        )


def test_heads_are_followed_in_time_across_a_resume(make_config, tmp_path):
    config = make_config(training__timeline_every=10, training__steps=20)
    loop.train(config, tmp_path, devices=jax.local_devices()[:1])
    path = run_folder.Folder(tmp_path).timeline
    first = timeline.read(path)
    assert [line["step"] for line in first] == [0, 10, 20]
    # What a killed run wrote after its checkpoint is written again.
    with path.open("a") as file:
        file.write(json.dumps({**first[-1], "step": 23}) + '\n{"step": 2')
    config.training.steps = 30
    loop.train(config, tmp_path, override_config=True, devices=jax.local_devices()[:1])
    lines = timeline.read(path)
    assert [line["step"] for line in lines] == [0, 10, 20, 30]
    assert lines[:3] == first
    folder, steps, scores, title = timeline.of_run(tmp_path)
    assert scores["gradient"].shape == (4, 2, 2)
    assert scores["previous_token"].max() <= 1
    assert np.isfinite(scores["uniform"]).all() and folder.name == "heads"
    assert timeline.of_run(tmp_path / "nowhere") is None
