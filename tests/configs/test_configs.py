"""Every config is valid, says what to expect, and trains."""

import ast
import functools
import pathlib
import re

import jax
import numpy as np
import pytest

from mha_haiku import runs, tasks
from mha_haiku.commands import config_files
from mha_haiku.training import train_step
from mha_haiku.training.runs import configuration, folders, loop
from tests import everyday, tiny_models, tiny_runs
from tests.test_readme import READMES

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_CONFIGS = config_files.available()
_PAPERS = [
    str(path.relative_to(_REPOSITORY))
    for path in sorted(_REPOSITORY.glob("configs/papers/*.py"))
    if path.stem != "__init__"
]


@pytest.mark.parametrize("path", [*_CONFIGS, *_PAPERS])
def test_any_config_may_take_few_steps(path):
    config = config_files.load(path)
    config_files.override(config, [("config.training.steps", "20")])
    tiny_runs.check_devices(config, 4)


_TASKS = [name for name in tasks.names() if name != "labeled_texts"]  # needs a file


@pytest.mark.parametrize("of", everyday.some([*_CONFIGS, *_PAPERS, *_TASKS], 4))
def test_config_or_default_suits_its_task_and_hides_its_targets(of):
    config = config_files.load(of) if of.endswith(".py") else runs.default_config(of)
    tiny_runs.check_devices(config, 4)
    task = configuration.make_task(config)
    if of != "sentences":  # on which nothing trains
        configuration.validate_for_task(config, task)
    batch = tasks.batch(task, jax.random.key(0), task.train_data, np.zeros(2, int))
    example = jax.tree.map(np.array, batch)
    example = example._replace(lengths=None, decoder_lengths=None)
    read = example.inputs if example.decoder_inputs is None else example.decoder_inputs
    if example.targets.shape != read.shape:  # one target of the whole example
        return
    counts = example.weights[:, :-1] > 0
    is_next = counts.any() and (read[:, 1:] == example.targets[:, :-1])[counts].all()
    assert is_next == (task.continues or example.decoder_inputs is not None)
    if not is_next:
        return
    read[1, -1] = (read[1, -1] + 1) % task.num_classes
    config = config.replace(
        model=dict(num_layers=1)
    )  # they are alike, and take long to compile
    model = folders.make_model(config.model, task)
    params = tiny_models.normal(folders.abstract_state(config, task, model).params)
    apply = jax.jit(functools.partial(model.apply, is_training=False))
    first, second = apply(params, None, **example.model_inputs()).logits
    np.testing.assert_array_equal(first[:-1], second[:-1])
    assert np.any(first[-1] != second[-1])


@pytest.mark.parametrize("path", everyday.some([*_CONFIGS, *_PAPERS], 8))
def test_config_is_valid_and_names_its_command_and_the_measured_baseline(path):
    config = config_files.load(path)
    tiny_runs.check_devices(config, 4)
    task = configuration.make_task(config)
    configuration.validate_for_task(config, task)
    docstring = ast.get_docstring(ast.parse((_REPOSITORY / path).read_text()))
    assert f"Run: python -m experiments.train --config={path}\n" in docstring
    assert "Expect: " in docstring
    baseline = r"\((chance|unigram|bag\s+of\s+words)\s+([\d.]+)\s+percent,\s+([\d.]+)\)"
    for name, percent, loss in re.findall(baseline, docstring):
        assert " ".join(name.split()) == task.baseline_name
        # Python's documentation, which text is trained on, differs by its version.
        tolerance = 0.02 if vars(config.data) else 0.001
        np.testing.assert_allclose(
            float(percent) / 100, task.baseline["accuracy"], atol=tolerance
        )
        np.testing.assert_allclose(
            float(loss), task.baseline["loss"], atol=5 * tolerance
        )


def test_induction_configs_differ_in_layers_alone():
    one, two = (
        config_files.load(f"configs/induction_{name}.py").to_json()
        for name in ("one_layer", "two_layers")
    )
    assert configuration.difference(one, two) == ["config.model.num_layers: 1 -> 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {
            "task": {"name": "reverse"},
            "embedding": {"segments": 2, "norm": True},
            "norm": {"position": "post"},
            "output": {"hidden": "gelu", "norm": True, "tied": True},
        },
        {
            "task": {"name": "induction"},
            "family": "causal",
            "embedding": {
                "positions": "rotary",
                "frequencies": [1.0, 0.0],
                "scale": 2.0,
            },
            "attention": {"num_heads": 2, "key_size": 4, "window": 3, "qk_norm": True},
            "feed_forward": {"activation": "geglu_tanh"},
            "norm": {"kind": "rms_norm"},
            "output": {"tied": True, "with_bias": False},
        },
    ],
)
def test_fields_of_other_peoples_models_train(fields, tmp_path):
    config = runs.default_config(fields["task"]["name"])
    model = {name: value for name, value in fields.items() if name != "task"}
    config = config.replace(
        model={"num_layers": 2, "model_size": 8} | model,
        optimizer=dict(warmup_steps=1, weight_decay=0.1),
        training=dict(steps=2, batch_size=4, evaluation_examples=3),
    )
    summary = loop.train(config, tmp_path, devices=jax.local_devices()[:1])
    assert np.isfinite(summary.metrics["held_out_loss"])
    run = folders.load_run(tmp_path)
    first = run.model.init(
        train_step.stream(config.seed, "init"), run.examples(1).inputs
    )
    moved = jax.tree.map(lambda x, y: bool(np.any(x != y)), first, run.params)
    still = {path for path, leaves in moved.items() if not any(leaves.values())}
    assert not still


# What commands of READMEs train, test_readme.py does.
_IN_READMES = {
    path
    for text in READMES.values()
    for path in re.findall(r"train --config=(configs/\w+\.py)", text)
}


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in _CONFIGS if path not in _IN_READMES])
def test_config_trains_two_steps(path, tmp_path):
    config = config_files.load(path).replace(
        model=dict(num_layers=1)
    )  # they are alike, and take long to compile
    if path == "configs/long_recall.py":  # of 8,192 positions a step takes seconds
        config = config.replace(task=dict(sequence_length=2048))
    config = config.replace(
        optimizer=dict(warmup_steps=1),
        training=dict(steps=2, batch_size=4, evaluation_examples=3),
    )
    summary = loop.train(config, tmp_path, devices=jax.local_devices()[:1])
    assert summary.steps == 2
    assert np.isfinite(summary.metrics["held_out_loss"])
