"""The config of the study of roll-out differs from text_mlm's in its sizes alone."""

import ast
import pathlib
import re

from experiments import config_files
from mha_haiku.runs import configuration

PATH = "configs/papers/rollout.py"


def test_it_is_valid_and_suits_its_task():
    config = config_files.load(PATH)
    configuration.validate(config)
    configuration.validate_for_task(config, configuration.make_task(config))


def test_it_differs_from_the_masked_language_model_in_sizes_alone():
    own, other = (
        configuration.to_json(config_files.load(path))
        for path in (PATH, "configs/text_mlm.py")
    )
    changed = [line.partition(":")[0] for line in configuration.difference(other, own)]
    assert changed == [
        "config.task.sequence_length",
        "config.model.num_layers",
        "config.model.model_size",
        "config.model.hidden_size",
        "config.model.max_length",
    ]


def test_its_docstring_says_how_to_run_it_and_what_was_measured():
    source = pathlib.Path(config_files.__file__).parents[1] / PATH
    docstring = ast.get_docstring(ast.parse(source.read_text()))
    run, expect = docstring.split("\n", maxsplit=3)[2:]
    assert run == f"Run: python -m experiments.train --config={PATH}"
    assert re.search(r"Expect: \d+ percent held-out accuracy, loss [\d.]+", expect)
    assert re.search(r"\d+ s on\s2 CPU cores", expect)


def test_every_field_has_a_comment():
    for line in config_files.describe(PATH):
        flag, _, comment = line.partition("  ")
        assert re.sub(r"\(\w+\)", "", comment).strip(), flag
