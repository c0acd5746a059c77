"""Studies of an encoder-decoder: its heads have a kind, a layer and a name."""

import csv
import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models, runs, tasks
from mha_haiku.showing import canvas
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import (
    gate_fits,
    per_head,
    prune_sweep,
    pruned_models,
    saved_models,
)
from mha_haiku.training import train_step
from mha_haiku.training.runs import configuration, folders
from tests import oracles

S, T, H, N = 5, 6, 2, 5
NAMES = ("encoder", "decoder", "cross")
KINDS = ("encoder", "decoder", "decoder", "cross", "cross")
LAYERS = (0, 0, 1, 0, 1)
KEPT = [[0, 1]] * 4 + [[1]]


@pytest.fixture
def config(make_config):
    """One layer and two of a decoder, whose last cross layer lost its first head."""
    config = make_config(
        model__family="encoder_decoder",
        model__num_layers=1,
        model__decoder__num_layers=2,
        model__dropout_rate=0.0,
        model__attention__kept_heads=KEPT,
    ).replace(task=runs.default_config("reverse_seq2seq").task)
    config = config.replace(task=dict(min_length=2, max_length=S, num_tokens=4))
    return config


@pytest.fixture
def subject(config, tmp_path):
    """An untrained run with attention that is far from uniform."""
    task = configuration.make_task(config)
    model = folders.make_model(config.model, task)
    example = tasks.batch(task, train_step.stream(0, "init"), (), jnp.arange(1))
    params = jax.jit(model.init)(jax.random.key(0), **example.model_inputs())
    params = jax.tree.map(lambda x: 3 * np.asarray(x), params)
    run = folders.Run(config, task, model, params, 4)
    return Subject.of_run(run, "reversing", folders.Folder(tmp_path / "reversing"))


def _rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def _places(rows):
    return [(row["kind"], int(row["layer"]), int(row["head"])) for row in rows]


PLACES = [
    (kind, layer, h)
    for kind, layer, kept in zip(KINDS, LAYERS, KEPT, strict=True)
    for h in kept
]


@pytest.mark.slow
def test_statistics_of_cross_heads_are_those_of_their_weights(subject):
    found = per_head.statistics(subject, examples=N)
    kinds_and_layers = list(zip(KINDS, LAYERS, strict=True))
    assert [(x.kind, x.number) for x in found.layers] == kinds_and_layers
    run = subject
    example = run.examples(N)
    maps = jax.jit(functools.partial(heads.model_runs.run, run.model))(
        run.params, example
    ).maps
    example = jax.device_get(example)
    aligned = heads.alignment.of_batch(run.task.alignments, example)["aligned"]
    padding = np.arange(S) >= example.lengths[:, None]
    for part in (3, 4):
        weights = np.float64(maps[part].weights())
        scores = np.float64(maps[part].scores())
        wanted = oracles.map_statistics(weights, unseen=padding[:, None], scores=scores)
        wanted["aligned"] = heads.alignment.shares(weights.argmax(-1), aligned)
        assert not np.isnan(wanted["aligned"]).any()
        for name, each in found.numbers.items():
            row = each.mean[part][~np.isnan(each.mean[part])]
            if name in ("same_token", "after_same_token"):
                assert not row.size
            else:
                np.testing.assert_allclose(row, wanted[name].mean(0), atol=1e-5)
    assert np.isnan(found.numbers["aligned"].mean[:3]).all()
    assert not np.isnan(found.numbers["same_token"].mean[:3]).any()
    assert _places(_rows(found.table().csv())) == PLACES
    for place in ("cross 1", "encoder 0"):
        assert place.split()[0] in found.text()
    assert canvas.content(found.plot).startswith(b"\x89PNG")


@pytest.mark.slow
def test_exact_match_is_a_metric_where_answers_are_whole(subject):
    example = subject.examples(8)
    generator = np.random.default_rng(0)
    right = generator.uniform(size=example.targets.shape) < 0.8
    answers = np.where(right, example.targets, (example.targets + 1) % 6)
    of = subject.measured(8, metric="exact_match")
    failures = of.metric(jax.nn.one_hot(answers, 6), example)
    wanted = ((example.weights > 0) & ~right).any(-1)
    assert 0 < wanted.mean() < 1
    np.testing.assert_array_equal(failures, wanted)
    assert computation.metric_name(subject) == "loss"
    assert computation.batch_size(subject, 100, 2 * S) == 1  # T is longer
    assert pruned_models.decisive(subject.task) == "exact_match"


def _layers(config, keep):
    config = config.replace(model=dict(attention=dict(kept_heads=keep)))
    return models.heads_of_layers(config.model)


def test_pruned_models_tell_how_many_heads_of_each_kind_stay(config, tmp_path):
    keeps = [[[0, 1]] * 5, [[], [1], [0, 1], [], [0]]]
    points = [
        prune_sweep.Point(
            _layers(config, keep), {"exact_match": 0.5, "loss": 1}, 7, 2.0, 1.0, 1.0
        )
        for keep in keeps
    ]
    result = prune_sweep.Pruned("a run", None, points)
    path, picture = result.save(tmp_path)
    rows = _rows(path.read_text())
    counts = [[int(row[kind]) for kind in NAMES] for row in rows]
    assert counts == [[2, 4, 4], [0, 3, 1]]
    assert [row["keep"] for row in rows] == ["0 1|0 1;0 1|0 1;0 1", "|1;0 1|;0"]
    curve = result.picture
    assert curve.keywords["metric_name"] == "held-out exact match"
    kinds = curve.args[-1]
    assert kinds == {"encoder": [2, 0], "decoder": [4, 3], "cross": [4, 1]}
    assert "| between encoder, decoder, cross" in result.text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    named = [
        point._replace(name=name)
        for point, name in zip(points, ("whole", "less"), strict=True)
    ]
    rows = _rows(dataclasses.replace(result, points=named).table().csv())
    counts = [[row[name] for name in ("model", "kept", *NAMES)] for row in rows]
    assert counts == [["whole", "10", "2", "4", "4"], ["less", "4", "0", "3", "1"]]


@pytest.mark.slow
def test_gates_ablate_heads_of_every_kind_and_a_pruned_run_is_one(config, tmp_path):
    config = config.replace(
        model=dict(attention=dict(kept_heads=None)),
        training=dict(steps=4),
        optimizer=dict(warmup_steps=2),
    )
    root = tmp_path / "run"
    runs.train(config, root, devices=jax.local_devices()[:1])
    subject = Subject.of_folder(root)
    found = gate_fits.fit_gates(
        subject, penalty=100.0, steps=60, gate_learning_rate=0.3
    )
    assert [gate.shape for gate in found.gates] == [(H,)] * 5
    assert not np.concatenate(found.gates).any()
    result = subject.sweep(keep=0.4, sizes=1, order="gradient", examples=4)
    whole, pruned = result.points
    assert (whole.kept, pruned.kept) == (10, 4)
    assert pruned.parameters < whole.parameters
    path = saved_models.save_run(result.smallest, tmp_path / "pruned", steps=2)
    again = folders.load_run(path)
    assert [list(x.names) for x in models.heads_of_layers(again.config.model)] == (
        pruned.keep
    )
    gates = heads.open_gates(subject.config.model, pruned.keep)
    metric = heads.gated_metric(subject.measured(8), np.stack(gates)[None]).mean()
    of = result.smallest.measured(8)
    assert heads.gated_metric(of, np.ones((1, 5, H))).mean() == pytest.approx(
        metric, abs=1e-5
    )
    assert set(pruned.metrics) == {"loss", "accuracy", "exact_match"}
