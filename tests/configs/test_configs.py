"""Every config is whole, says what to expect, and trains."""

import ast
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from experiments import config_files
from mha_haiku.runs import configuration, loop

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_CONFIGS = config_files.available()
_OF_THE_TASK = ("config.task.", "config.data.")
_WANTED = {
    "associative_recall",
    "copy",
    "digits_anomaly",
    "histogram",
    "induction_one_layer",
    "induction_two_layers",
    "long_recall",
    "modular_addition",
    "parity",
    "reverse",
    "sort",
    "text_lm",
    "text_mlm",
}

every_config = pytest.mark.parametrize("path", _CONFIGS)


def _types(config, prefix="config"):
    """Returns the type of each field, by its dotted name."""
    types = {}
    for key in config:
        name = f"{prefix}.{key}"
        if config.get_type(key) is type(config):
            types |= _types(config[key], name)
        else:
            types[name] = config.get_type(key)
    return types


def test_every_promised_config_is_there():
    assert {pathlib.Path(path).stem for path in _CONFIGS} == _WANTED


@every_config
def test_config_is_valid_and_suits_its_task(path):
    config = config_files.load(path)
    configuration.validate(config)
    configuration.validate_for_task(config, configuration.make_task(config))


@every_config
def test_docstring_says_how_to_run_it_and_what_was_measured(path):
    docstring = ast.get_docstring(ast.parse((_REPOSITORY / path).read_text()))
    title, empty, run, expect = docstring.split("\n", maxsplit=3)
    assert title.endswith(".")
    assert not empty
    assert run == f"Run: python -m experiments.train --config={path}"
    expect = " ".join(expect.split())
    assert expect.startswith("Expect: ")
    assert re.search(r"\d percent held-out accuracy", expect)
    assert re.search(r"loss [\d.]+", expect)
    assert re.search(r"\((chance|unigram) [\d.]+ percent, [\d.]+\)", expect)
    assert re.search(r"\d+ s(, | )on 2 CPU cores", expect)


@every_config
def test_docstring_names_the_measured_baseline(path):
    config = config_files.load(path)
    task = configuration.make_task(config)
    docstring = ast.get_docstring(ast.parse((_REPOSITORY / path).read_text()))
    (found,) = re.findall(r"\((\w+)\s+([\d.]+)\s+percent,\s+([\d.]+)\)", docstring)
    name, percent, loss = found
    assert name == task.baseline_name
    # Python's documentation, which text is trained on, differs between its versions.
    tolerance = 0.02 if "data" in config else 0.001
    np.testing.assert_allclose(
        float(percent) / 100, task.baseline["accuracy"], atol=tolerance
    )
    np.testing.assert_allclose(float(loss), task.baseline["loss"], atol=5 * tolerance)


@every_config
def test_every_config_has_the_same_fields_and_types(path):
    """Nothing is defaulted elsewhere, so what one file leaves out no run would have."""

    def common(path):
        types = _types(config_files.load(path))
        return {
            name: types[name] for name in types if not name.startswith(_OF_THE_TASK)
        }

    assert common(path) == common("configs/reverse.py")


def test_text_configs_have_the_same_data_fields():
    data = {
        path: config_files.load(path).data.to_dict()
        for path in _CONFIGS
        if "data" in config_files.load(path)
    }
    assert {pathlib.Path(path).stem for path in data} == {"text_lm", "text_mlm"}
    assert len({json.dumps(fields) for fields in data.values()}) == 1


@every_config
def test_every_field_has_a_comment(path):
    for line in config_files.describe(path):
        flag, _, comment = line.partition("  ")
        assert re.sub(r"\(\w+\)", "", comment).strip(), flag


def test_induction_configs_differ_in_layers_alone():
    one, two = (
        configuration.to_json(config_files.load(f"configs/induction_{name}.py"))
        for name in ("one_layer", "two_layers")
    )
    assert configuration.difference(one, two) == ["config.model.num_layers: 1 -> 2"]


@pytest.fixture
def _compiled_fast():
    """What runs two steps is not worth optimizing."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(
    "path",
    [
        # Its length takes seconds a step.
        pytest.param(path, marks=pytest.mark.slow if "long_recall" in path else ())
        for path in _CONFIGS
    ],
)
def test_config_trains_two_steps(path, tmp_path, _compiled_fast):
    config = config_files.load(path)
    config.model.num_layers = 1  # they are alike, and take long to compile
    config.optimizer.warmup_steps = 1
    config.training.steps = 2
    config.training.batch_size = 4
    config.training.evaluation_examples = 3
    summary = loop.train(config, tmp_path, devices=jax.local_devices()[:1])
    assert summary.steps == 2
    assert np.isfinite(summary.metrics["held_out_loss"])
