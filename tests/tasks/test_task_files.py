"""A task of the user's, in a file or given in Python, is one like any other."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from experiments import dump_attention, train
from mha_haiku import runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import configuration

SOURCE = '''
from __future__ import annotations  # whose types are looked up in the module's names

import dataclasses

import jax
import jax.numpy as jnp

from mha_haiku import fields, tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(tasks.Task):
    """The target is the token so many steps on."""

    sequence_length: int = 6
    step: int = 1
    odds: float = fields.field(0.5, "unused", fields.portion)
    num_tokens = num_classes = 5
    baseline = {"accuracy": 0.2, "loss": 1.609}

    def example(self, key, data):
        inputs = jax.random.randint(key, (self.sequence_length,), 0, 5)
        weights = jnp.ones(self.sequence_length)
        return tasks.Example(inputs, (inputs + self.step) % 5, weights)


class NoTask:
    pass


class Plain(tasks.Task):
    pass


@dataclasses.dataclass(frozen=True)
class Half(tasks.Task):
    sequence_length = num_tokens = 5

    def example(self, key, data):
        return None


@dataclasses.dataclass(frozen=True)
class Needs(Half):
    num_classes, baseline = 5, {"accuracy": 0.2, "loss": 1.609}
    size: int

    def __post_init__(self):
        if self.size == 3:
            raise KeyError("three")


class_by_mistake = 3
'''
TINY = [
    "--config=configs/reverse.py",
    "--config.training.steps=2",
    "--config.training.evaluation_examples=4",
    "--config.training.batch_size=4",
    "--config.optimizer.warmup_steps=1",
    "--workdir=run",
    "--compilation_cache=",
]


@pytest.fixture(autouse=True)
def _file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(SOURCE)


def _train(name, *options):
    return train.run(["train", *TINY, f"--config.task.name={name}", *options])


def test_options_of_a_file_are_its_dataclass_fields():
    options = tasks.options("mine.py:Step")["task"]
    assert {name: field.default for name, field in options.items()} == {
        "sequence_length": 6,
        "step": 1,
        "odds": 0.5,
    }
    task = tasks.make("mine.py:Step", step=3)
    assert (task.step, task.name) == (3, "Step")
    assert tasks.make("mine.py:Step", step=3) == task  # the file was read once
    assert runs.default_config("mine.py:Step").task.step == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["min.py:Step"], "'min.py' cannot be read: No such file"),
        ([".:Step"], "'.' cannot be read: Is a directory"),
        (["a\0b:Step"], "cannot be read"),
        (["mine.py:Stp"], "mine.py has no class 'Stp'; .* Did you mean 'Step'?"),
        (["mine.py:"], "mine.py has no class ''"),
        (
            ["mine.py:class_by_mistake"],
            "must be a subclass of mha_haiku.tasks.Task",
        ),
        (["mine.py:NoTask"], "must be a subclass of mha_haiku.tasks.Task"),
        (["mine.py:Plain"], "must be a frozen dataclass"),
        (["mine.py:Half"], "mine.py:Half must have num_classes, baseline"),
        (["mine.py:Needs"], "config.task.size must be given"),
        (["mine.py:Needs", "--config.task.size=3"], "raised KeyError: 'three'"),
        (["mine.py:Needs", "--config.task.size=4"], "must return a tasks.Example"),
        (["mine.py:Step", "--config.task.step=x"], "task.step must be an integer"),
        (["mine.py:Step", "--config.task.odds=2"], r"task.odds .* in \[0, 1\]"),
        (["mine.py:Step", "--config.task.num_tokens=2"], "there is no such field"),
        (["mine.py:Step", "--config.task.sequence_length=99"], "max_length .* 99"),
        (["raises.py:Step"], "raises.py raised ZeroDivisionError"),
        (["leaves.py:Step"], "leaves.py raised SystemExit"),
        (["wrong.py:Step"], "wrong.py is not Python, line 1"),
        ([":Step"], "'Step' was given in Python"),
    ],
)
def test_a_file_that_holds_no_such_task_costs_two_lines(capsys, arguments, message):
    pathlib.Path("raises.py").write_text("1 / 0")
    pathlib.Path("leaves.py").write_text("raise SystemExit(3)")
    pathlib.Path("wrong.py").write_text("def")
    assert _train(*arguments) == 2
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if "compiling" not in line]
    assert len(lines) <= 2
    assert re.search(message, " ".join(lines)), told


@pytest.mark.slow
def test_a_run_of_a_file_is_read_with_the_same_file(capsys):
    assert _train("mine.py:Step", "--config.task.step=2") == 0
    run = runs.load_run("run")
    assert (run.config.task.name, run.task.step) == ("mine.py:Step", 2)
    dump = ["dump_attention", "--workdir=run"]
    pathlib.Path("mine.py").write_text(SOURCE + "\n")
    capsys.readouterr()
    assert dump_attention.run(dump) == 2
    assert "has changed" in capsys.readouterr().err
    assert _train("mine.py:Step", "--config.task.step=2") == 2
    assert "has changed" in capsys.readouterr().err
    pathlib.Path("mine.py").unlink()
    assert dump_attention.run(dump) == 2
    assert "'mine.py' cannot be read" in capsys.readouterr().err
    pathlib.Path("mine.py").write_text(SOURCE)
    assert dump_attention.run(dump) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Same(tasks.Task):
    """The target is the token."""

    sequence_length: int = 6
    num_tokens = num_classes = 5
    baseline = {"accuracy": 0.2, "loss": 1.609}  # noqa: RUF012

    def example(self, key, data):
        inputs = jnp.arange(6) % 5
        return tasks.Example(inputs, inputs, jnp.ones(6))


@pytest.mark.slow
def test_a_task_may_be_given_in_python(make_config):
    runs.train(
        make_config(training__steps=2, optimizer__warmup_steps=1),
        "run",
        task=Same(),
        devices=jax.local_devices()[:1],
    )
    run = runs.load_run("run")
    assert run.task == Same()
    assert run.config.task.name == f"{pathlib.Path(__file__)}:Same"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner(Same):
        """A class that is in no file by its name."""

    config = configuration.with_task(make_config(), Inner(sequence_length=4))
    assert config.task.to_json() == {
        "name": f":{Inner.__qualname__}",
        "sequence_length": 4,
    }
    assert configuration.make_task(config) == Inner(sequence_length=4)
    reverse = tasks.make("reverse", sequence_length=3, num_tokens=4)
    assert configuration.with_task(config, reverse).task.name == "reverse"
    with pytest.raises(TypeError, match="task must be a mha_haiku.tasks.Task"):
        runs.train(make_config(), "other", task="reverse")
    with pytest.raises(ConfigError, match="given in Python"):
        tasks.options(":Other")
