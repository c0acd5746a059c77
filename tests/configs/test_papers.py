"""Configs of published results differ from shipped ones in what they are about."""

import ast
import pathlib
import re

import pytest

from experiments import config_files
from mha_haiku.runs import configuration

_STEPS = (
    "config.training.steps",
    "config.training.evaluate_every",
    "config.training.checkpoint_every",
)
_SIZES = (
    "config.task.sequence_length",
    "config.model.num_layers",
    "config.model.num_heads",
    "config.model.model_size",
    "config.model.hidden_size",
    "config.model.max_length",
)
# Of each config: the shipped one that it is made of, and the fields that differ.
_PAPERS = {
    "induction_smeared_keys": (
        "induction_one_layer",
        ["config.model.smear_keys", "config.training.timeline_every"],
    ),
    "learned_gates": ("text_lm", [*_SIZES, *_STEPS]),
    "pruned_heads": (
        "induction_two_layers",
        ["config.model.num_heads", "config.model.key_size"],
    ),
}
_SCRIPTS = {"learned_gates": "learn_gates", "pruned_heads": "prune_heads"}

every_paper = pytest.mark.parametrize("name", _PAPERS)


def _path(name):
    return f"configs/papers/{name}.py"


def _docstring(name):
    source = pathlib.Path(config_files.__file__).parents[1] / _path(name)
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))


@every_paper
def test_it_is_valid_and_suits_its_task(name):
    config = config_files.load(_path(name))
    configuration.validate(config)
    configuration.validate_for_task(config, configuration.make_task(config))


@every_paper
def test_it_differs_from_a_shipped_config_in_what_it_is_about(name):
    shipped, fields = _PAPERS[name]
    own, other = (
        configuration.to_json(config_files.load(path))
        for path in (_path(name), f"configs/{shipped}.py")
    )
    changed = configuration.difference(other, own)
    assert [line.partition(":")[0] for line in changed] == fields


@every_paper
def test_every_field_has_a_comment(name):
    for line in config_files.describe(_path(name)):
        flag, _, comment = line.partition("  ")
        assert re.sub(r"\(\w+\)", "", comment).strip(), flag


@every_paper
def test_its_docstring_says_how_to_run_it_and_what_was_measured(name):
    docstring = _docstring(name)
    command = f"\nRun: python -m experiments.train --config={_path(name)}\n"
    assert command in docstring
    expect = docstring.partition("\nExpect: ")[2]
    assert re.match(r"[\d.]+ percent held-out accuracy, loss [\d.]+", expect)
    assert re.search(r"\d+\ss\s+on\s2\sCPU\scores", expect)


@pytest.mark.parametrize("name", _SCRIPTS)
def test_its_docstring_names_the_command_of_the_published_result(name):
    command = f"python -m experiments.{_SCRIPTS[name]} --workdir=runs/{name} --"
    assert command in _docstring(name)
