"""Texts at the evaluations of a training: which runs, and after an interruption."""

import json

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.subjects.observers import Samples
from mha_haiku.subjects.verbs import generation
from mha_haiku.training.runs import configuration, files, folders

DEVICES = jax.local_devices()[:1]


@pytest.fixture
def config_of(make_config):
    """A function that makes the config of a tiny run of a task and a family."""

    def make(task, family, **fields):
        config = make_config(
            model__num_layers=1, model__family=family, training__samples=2, **fields
        )
        config = config.replace(task=dict(name=task))
        if task == "reverse_seq2seq":
            config = config.replace(task=dict(min_length=2, max_length=4, num_tokens=5))
        else:
            config = config.replace(task=dict(sequence_length=6, num_tokens=7))
        return config

    return make


def _samples(config):
    kind = generation.given(config)
    return Samples(config.training, kind)


def _train(config, folder, *observers):
    observers = [_samples(config), *observers]
    runs.train(config, folder, observers=observers, devices=DEVICES)
    return files.read_lines(folders.Folder(folder).samples)


def _numbers(folder):
    """Returns the metrics without what depends on the clock."""
    lines = map(json.loads, folders.Folder(folder).metrics.read_text().splitlines())
    timed = ("seconds", "examples_per_second")
    return [{k: v for k, v in x.items() if k not in timed} for x in lines]


@pytest.mark.slow
def test_texts_of_a_step_are_told_and_kept_once(config_of, tmp_path, capsys):
    config = config_of("induction", "causal")
    task, folder = configuration.make_task(config), folders.Folder(tmp_path)
    model = folders.make_model(config.model, task)
    params = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype),
        folders.abstract_state(config, task, model).params,
    )

    def looked(start, *steps):
        observer = _samples(config)
        observer.begin(folder, config, task, start)
        for step in steps:
            if observer.wants(step):
                observer.look(step, params)
        observer.end()
        return [line["step"] for line in files.read_lines(folder.samples)]

    assert looked(0, 0, 5, 10, 20) == [10, 10, 20, 20]
    one, *_ = lines = files.read_lines(folder.samples)
    given, text = json.dumps(one["given"]), json.dumps(one["text"])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"step 10/30  sample {given} -> {text}" and len(out) == 4
    assert looked(10, 10, 20, 30) == [10, 10, 20, 20, 30, 30]  # killed after 10
    assert files.read_lines(folder.samples)[:4] == lines
    assert looked(30, 30) == [10, 10, 20, 20, 30, 30]


@pytest.mark.slow
def test_samples_change_no_metric_and_survive_a_kill(config_of, tmp_path, capsys):
    config = config_of("induction", "causal")
    whole, without, killed = (tmp_path / name for name in ("a", "b", "c"))
    lines = _train(config, whole)
    assert [line["step"] for line in lines] == [10, 10, 20, 20, 30, 30]
    assert len({line["given"] for line in lines}) == 2
    out = capsys.readouterr().out.splitlines()
    (place,) = (i for i, line in enumerate(out) if "step 20/30  held-out" in line)
    for i, line in enumerate(lines[2:4], start=1):
        given, text = json.dumps(line["given"]), json.dumps(line["text"])
        assert out[place + i] == f"step 20/30  sample {given} -> {text}"

    runs.train(config, without, devices=DEVICES)
    assert _numbers(without) == _numbers(whole)
    assert not folders.Folder(without).samples.exists()

    def stop(step, params):
        if step == 20:  # the checkpoint of step 10 knows nothing of these samples
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        _train(config, killed, runs.Observer(5, stop))
    assert len(files.read_lines(folders.Folder(killed).samples)) == 4
    assert _train(config, killed) == lines


@pytest.mark.slow
def test_samples_of_an_encoder_decoder_have_right_answers(config_of, tmp_path, capsys):
    lines = _train(config_of("reverse_seq2seq", "encoder_decoder"), tmp_path)
    assert [line["step"] for line in lines] == [10, 10, 20, 20, 30, 30]
    for line in lines:
        assert line["right"].split() == line["given"].split()[::-1]
    shown = [line for line in capsys.readouterr().out.splitlines() if "sample" in line]
    assert len(shown) == 6
    for line, text in zip(lines, shown, strict=True):
        right = "right" if line["text"] == line["right"] else json.dumps(line["right"])
        assert text.endswith(f"-> {json.dumps(line['text'])} ({right})")


@pytest.mark.parametrize(
    ("task", "family", "count", "every"),
    [
        ("induction", "causal", 1, 10),
        ("reverse_seq2seq", "encoder_decoder", 3, 10),
        ("induction", "causal", 0, 0),
        ("induction", "encoder", 1, 0),
        ("associative_recall", "causal", 1, 0),
    ],
)
def test_runs_that_write_texts_have_samples(make_config, task, family, count, every):
    config = make_config(model__family=family, training__samples=count)
    config = config.replace(task=dict(name=task))
    assert _samples(config).every == every
