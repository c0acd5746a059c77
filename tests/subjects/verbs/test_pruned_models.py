"""Runs without some of their heads: which go, and what is left."""

import csv
import json
import types

import jax
import numpy as np
import pytest

from mha_haiku import heads, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.records import map_set
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import (
    dumps,
    per_head,
    prune_sweep,
    pruned_models,
    quality,
    saved_models,
)
from mha_haiku.training.runs import folders, loop


@pytest.fixture(autouse=True)
def _speed_is_measured_briefly(monkeypatch):
    monkeypatch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)


@pytest.mark.slow
def test_a_pruned_run_is_a_run(trained, tmp_path):
    folder = trained()
    found = Subject.of_folder(folder).sweep(
        keep=0.5, sizes=1, order="confidence", examples=4
    )
    whole, half = found.points
    assert (whole.kept, half.kept) == (4, 2)
    assert half.parameters < whole.parameters
    assert half.ideal_speed_up > whole.ideal_speed_up == 1
    out = saved_models.save_run(found.smallest, tmp_path / "pruned", steps=7)
    run = folders.load_run(out)
    assert run.step == 7
    names = [layer.names for layer in models.heads_of_layers(run.config.model)]
    assert [list(x) for x in names] == half.keep
    # It is looked at like any other, and its heads keep their names.
    measured = per_head.statistics(Subject.of_folder(out), examples=3)
    there = ~np.isnan(measured.numbers["entropy"].mean)
    wanted = np.zeros_like(there)
    for layer, names in enumerate(half.keep):
        wanted[layer, names] = True
    np.testing.assert_array_equal(there, wanted)
    maps = map_set.MapSet.load(dumps.dump(Subject.of_folder(out)))
    assert [list(map(int, layer.heads)) for layer in maps.layers] == list(
        map(list, half.keep)
    )
    for weights, names in zip(maps.examples[0].weights, half.keep, strict=True):
        assert len(weights) == len(names)
    with pytest.raises(ConfigError, match="holds a run; give an empty folder"):
        saved_models.save_run(found.smallest, out, steps=0)


def test_a_pruned_run_that_was_killed_in_training_is_resumed(
    trained, tmp_path, monkeypatch
):
    calls = []

    def killed(config, folder):
        calls.append((config.training.steps, folder))
        return types.SimpleNamespace(interrupted=False)

    run = Subject.of_folder(trained())
    monkeypatch.setattr(loop, "train", killed)
    keep, other = [[0], [0, 1]], [[0, 1], [1]]
    pruned = pruned_models.without_heads(run, keep)
    out = saved_models.save_run(pruned, tmp_path / "out", steps=7)
    saved_models.check_free(out, steps=7)
    assert saved_models.save_run(pruned, out, steps=7) == out
    assert calls == [(7, out)] * 2
    for again, steps in (
        (pruned, 8),
        (pruned, 0),
        (pruned_models.without_heads(run, other), 7),
    ):
        with pytest.raises(ConfigError, match="holds a run; give an empty folder"):
            saved_models.save_run(again, out, steps=steps)
    for steps in (0, 8):
        with pytest.raises(ConfigError, match="holds a run; give an empty folder"):
            saved_models.check_free(out, steps=steps)
    assert len(calls) == 2


@pytest.mark.slow
def test_pruned_runs_are_pruned_again_by_place_and_saved_whole(trained, tmp_path):
    subject = Subject.of_folder(trained())
    subject = run = pruned_models.without_heads(subject, [[1], [0, 1]])
    order = [(0, 0), (1, 1), (1, 0)]
    assert pruned_models.kept_after(run, order, 2) == [[], [0, 1]]
    assert pruned_models.kept_after(run, order, 1) == [[], [0]]
    of = subject.measured(4)
    least_first = heads.order(heads.confidence(of).mean)
    options = {"ablation_value": "zero", "examples": 4}
    assert pruned_models.order_of(subject, "confidence", **options) == least_first
    steps = heads.greedy_order(of)
    greedy = pruned_models.order_of(subject, "greedy", **options)
    assert greedy == [each.head for each in steps]
    folder = saved_models.save_run(run, tmp_path, steps=0)
    again = folders.load_run(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    assert again.step == 0
    assert again.config.training.steps == 1


@pytest.mark.slow
def test_held_out_metrics_are_those_of_the_training(trained, task, make_model):
    folder = trained()
    written = json.loads(folders.Folder(folder).summary.read_text())["metrics"]
    run = Subject.of_folder(folder)
    found = quality.held_out(run)
    for name in ("accuracy", "loss"):
        assert found[name] == pytest.approx(written[f"held_out_{name}"], rel=1e-5)
    # Held-out targets of this task, and no others, are three above their tokens.
    params = {"table": 9 * np.roll(np.eye(7), 3, axis=1), "bias": np.zeros(7)}
    known = run.replace(task=task, model=make_model(), params=params)
    assert quality.held_out(known)["accuracy"] == 1


@pytest.mark.slow
def test_points_are_the_models_that_they_name(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(prune_sweep, "_alternating", lambda *timed: (2.0, 0.5))
    folder = trained()
    found = Subject.of_folder(folder).sweep(examples=4)
    assert [point.kept for point in found.points] == [4, 3, 2, 1, 0]
    for before, after in zip(found.points, found.points[1:], strict=False):
        for kept, left in zip(before.keep, after.keep, strict=True):
            assert set(left) <= set(kept)
    run = Subject.of_folder(folder)
    wanted = quality.held_out(pruned_models.without_heads(run, found.points[2].keep))
    assert found.points[2].metrics == wanted
    assert found.points[3].speed_up == 4
    assert found.points[3].examples_per_second == 8 / 0.5
    path, _ = found.save(tmp_path)
    with path.open(newline="") as file:
        assert [int(line["kept"]) for line in csv.DictReader(file)] == [4, 3, 2, 1, 0]
    assert found.text().startswith(f"{found.title}\n\n")


@pytest.fixture
def ordered(monkeypatch):
    """Accuracies by numbers of heads, and an order, that need no measuring."""
    found = {4: 0.75, 3: 0.75, 2: 0.5, 1: 0.75, 0: 0.25}

    def accuracies(run, counts):
        return [found[count] for count in counts]

    def point(run):
        layers = models.heads_of_layers(run.config.model)
        (accuracy,) = accuracies(run, [sum(len(x.names) for x in layers)])
        return {"accuracy": accuracy}

    def order_of(subject, by, **options):
        return [(0, 1), (1, 0), (1, 1), (0, 0)]

    monkeypatch.setattr(
        pruned_models,
        "ablated_in_order",
        lambda subject, order, counts: accuracies(subject, counts),
    )
    monkeypatch.setattr(quality, "held_out", lambda run, vectors: point(run))
    monkeypatch.setattr(pruned_models, "order_of", order_of)
    monkeypatch.setattr(prune_sweep, "points", lambda runs, **_: [*map(point, runs)])


def _kept(request, folder):
    found = Subject.of_folder(folder).prune(**request)
    layers = models.heads_of_layers(found.config.model)
    return [list(layer.names) for layer in layers]


@pytest.mark.slow
def test_heads_go_as_long_as_the_accuracy_allows(ordered, trained):
    folder = trained()
    for drop, kept in [(1.0, 0), (0.375, 1), (0.25, 1), (0.125, 3), (0.0, 3)]:
        assert sum(map(len, _kept({"metric_drop": drop}, folder))) == kept
    found = Subject.of_folder(folder).sweep(metric_drop=0.125)
    assert [point["accuracy"] for point in found.points] == [0.75, 0.75]  # 4 and 3


def test_the_nearest_number_of_heads_stays_and_those_first_in_order_go(
    ordered, trained
):
    folder = trained()
    assert _kept({"keep": 0.4}, folder) == [[0], [1]]
    assert _kept({"keep": 0.0}, folder) == [[], []]
    assert _kept({"keep": 0.75}, folder) == [[0], [0, 1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0.5, "metric_drop": 0.5}, "keep and metric_drop must not be given"),
        ({"keep": 1.5}, r"keep must be a number in \[0, 1\], got 1.5"),
        ({"keep": 0.5, "order": "greed"}, "order .* Did you mean 'greedy'"),
        ({"keep": 0.5, "ablation_value": "none"}, "ablation_value must be one of"),
        ({"keep": np.float32(1.5)}, r"keep must be a number in \[0, 1\], got .*1.5"),
        ({"keep": [[0], []], "metric_drop": 0.5}, "keep and metric_drop must not be"),
        ({"keep": [[0], []], "order": "greed"}, "order .* Did you mean 'greedy'"),
        ({"keep": [[0], []], "order": "random"}, "order must be left out .*'random'"),
        ({"keep": [[0], []], "ablation_value": "none"}, "ablation_value must be one"),
        ({"keep": [[0], []], "ablation_value": "mean"}, "ablation_value .* left out"),
        ({"keep": [[0], []], "examples": -3}, "examples must be an integer .* got -3"),
    ],
)
def test_what_cannot_be_pruned_is_refused(trained, fields, message):
    with pytest.raises(ConfigError, match=message):
        Subject.of_folder(trained()).prune(**fields)
