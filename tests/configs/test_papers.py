"""Configs of published results differ from shipped ones in what they are about."""

import ast
import pathlib
import re

from experiments import config_files
from mha_haiku.training import config as run_config

PATH = "configs/papers/induction_smeared_keys.py"


def test_smeared_keys_are_all_that_sets_it_apart_from_one_layer():
    config = config_files.load(PATH)
    run_config.validate(config)
    other = config_files.load("configs/induction_one_layer.py")
    changed = run_config.difference(*map(run_config.to_json, (other, config)))
    assert [line.partition(":")[0] for line in changed] == [
        "config.model.smear_keys",
        "config.training.timeline_every",
    ]


def test_its_docstring_says_how_to_run_it_and_what_was_measured():
    source = pathlib.Path(config_files.__file__).parents[1] / PATH
    docstring = ast.get_docstring(ast.parse(source.read_text()))
    assert f"Run: python -m experiments.train --config={PATH}\nExpect: " in docstring
    expect = docstring.partition("Expect: ")[2]
    assert re.match(r"[\d.]+ percent held-out accuracy, loss [\d.]+", expect)
