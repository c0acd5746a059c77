"""A task of the user's, in a file or given in Python, is one like any other."""

import dataclasses
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import mha_haiku as mh
from mha_haiku import commands, runs, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.subjects import pictures
from mha_haiku.training.runs import configuration, folders
from mha_haiku.training.tasks import task_files
from tests import docstring, tiny_runs

SOURCE = '''
from __future__ import annotations  # whose types are looked up in the module's names

import dataclasses

import jax
import jax.numpy as jnp

from mha_haiku import fields, tasks
from mha_haiku.core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(tasks.Task):
    """The target is the token so many steps on."""

    sequence_length: int = 6
    step: int = 1
    odds: float = fields.field(0.5, "unused", checks.share)
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
        if self.size == 5:
            raise SystemExit("five")


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
    return commands.run(["train", *TINY, f"--config.task.name={name}", *options])


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
        (["mine.py:Stp"], "mine.py has no class 'Stp'. Did you mean 'Step'?"),
        (["mine.py:"], "mine.py has no class ''"),
        (["mine.py:class_by_mistake"], "must be a subclass of mha_haiku.tasks.Task"),
        (["mine.py:NoTask"], "must be a subclass of mha_haiku.tasks.Task"),
        (["mine.py:Plain"], "must be a frozen dataclass"),
        (["mine.py:Half"], "mine.py:Half must have num_classes, baseline"),
        (["mine.py:Needs"], "config.task.size must be given"),
        (["mine.py:Needs", "--config.task.size=3"], "raised KeyError: 'three'"),
        (["mine.py:Needs", "--config.task.size=5"], "raised SystemExit: five"),
        (["mine.py:Needs", "--config.task.size=4"], "must return a tasks.Example"),
        (["mine.py:Step", "--config.task.step=x"], "task.step must be an integer"),
        (["mine.py:Step", "--config.task.odds=2"], r"task.odds .* in \[0, 1\]"),
        (["mine.py:Step", "--config.task.num_tokens=2"], "there is no such field"),
        (["mine.py:Step", "--config.task.sequence_length=99"], "max_length .* 99"),
        (["raises.py:Step"], "raises.py raised ZeroDivisionError"),
        (["leaves.py:Step"], "leaves.py raised SystemExit"),
        (["wrong.py:Step"], "wrong.py raised SyntaxError: .*line 1"),
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
    name = f"{pathlib.Path('mine.py').resolve()}:Step"
    assert (run.config.task.name, run.task.step) == (name, 2)
    dump = ["dump_attention", "--workdir=run"]
    pathlib.Path("mine.py").write_text(SOURCE + "\n")
    capsys.readouterr()
    assert commands.run(dump) == 2
    assert "has changed" in capsys.readouterr().err
    assert _train("mine.py:Step", "--config.task.step=2") == 2
    assert "has changed" in capsys.readouterr().err
    pathlib.Path("mine.py").unlink()
    assert commands.run(dump) == 2
    assert "mine.py' cannot be read" in capsys.readouterr().err
    pathlib.Path("mine.py").write_text(SOURCE)
    assert commands.run(dump) == 0


@pytest.fixture
def stranger(monkeypatch, make_config):
    """A run whose task leaves a mark when its file is executed, in a new process."""
    pathlib.Path("evil.py").write_text(SOURCE + "\nopen('mark', 'a').close()\n")
    folder = folders.Folder(pathlib.Path("stranger"))
    config = configuration.default_config("evil.py:Step")
    config = config.replace(model=make_config().model.to_json())
    folders.write_config(folder, config, jax.local_devices()[:1])
    pathlib.Path("mark").unlink()
    monkeypatch.setattr(task_files, "_loaded", {})
    return folder.root


_COMMANDS = [
    *("circuits", "dump_attention", "generate --prompt=1", "head_importance"),
    *("head_statistics", "learn_gates", "prune_heads --keep=0.5", "rollout", "train"),
    "train --config=configs/reverse.py --config.training.steps=2",
    "prune_heads --keep=0.5 --workdir=new --out=stranger",
    "import_model --source=stranger --workdir=new",
    "import_model --source=nonsense",
]


@pytest.mark.parametrize("command", _COMMANDS)
def test_no_command_executes_what_a_run_names(command, stranger, capsys):
    name, *flags = command.split()
    before = sorted(pathlib.Path().rglob("*"))
    assert commands.run([name, f"--workdir={stranger}", *flags]) == 2
    assert sorted(pathlib.Path().rglob("*")) == before
    told = capsys.readouterr().err
    flags_there = {option.name for option in commands.commands()[name].options}
    if "trust" in flags_there and "--out=stranger" not in flags:
        assert "would execute the file 'evil.py'" in told
        assert "--trust" in told


def test_every_command_that_opens_a_run_can_trust_it():
    named = {command.split()[0] for command in _COMMANDS}
    for path in pathlib.Path(__file__).parents[3].glob("experiments/[!_]*.py"):
        name = path.stem
        if name not in ("import_model", "reproduce", "gallery"):
            flags = {option.name for option in commands.commands()[name].options}
            assert {"workdir", "trust"} <= flags and name in named


@pytest.mark.parametrize(
    "use",
    [
        mh.load,
        lambda root: mh.show(root),
        pictures.dossier_of,  # of compare=,
        lambda root: runs.train(runs.default_config(), root),
        lambda root: mh.MapSet.load(root),
    ],
)
def test_nothing_executes_what_a_run_names_before_it_is_trusted(use, stranger):
    with pytest.raises(ConfigError):
        use(stranger)
    assert not pathlib.Path("mark").exists()


def test_a_file_that_a_run_names_is_executed_where_the_caller_trusts_it(
    stranger, monkeypatch
):
    config = configuration.default_config("evil.py:Step")
    tiny_runs.write_untrained(stranger, config.replace(model=dict(model_size=8)))
    monkeypatch.setattr(task_files, "_loaded", {})
    pathlib.Path("mark").unlink()
    with pytest.raises(ConfigError, match=r"trust=True\), or by --trust"):
        mh.load(stranger)
    assert mh.load(stranger, trust=True).task.name == "Step"
    assert pathlib.Path("mark").exists()
    assert runs.load_run(stranger).task.name == "Step"  # it is known now
    # What is trusted is this content of the file.
    pathlib.Path("evil.py").write_text("open('other', 'a').close()")
    for trust in (False, True):
        with pytest.raises(ConfigError, match="has changed"):
            mh.load(stranger, trust=trust)
    assert not pathlib.Path("other").exists()


@pytest.mark.parametrize(
    "typed",
    [
        ["--workdir=stranger", "--trust"],
        ["--workdir=stranger", "--config.task.name=evil.py:Step"],
        ["--workdir=stranger", "--config=evil_config.py"],
    ],
)
def test_a_command_that_names_the_file_or_trusts_runs_executes_it(
    typed, stranger, monkeypatch
):
    pathlib.Path("evil_config.py").write_text(
        "from mha_haiku import runs\n"
        "def get_config():\n"
        "    return runs.default_config('evil.py:Step')\n"
    )
    read = []

    def recorded(config, workdir, **options):
        read.append(folders.read_config(folders.Folder(workdir)).task.name)
        raise ConfigError("enough")

    monkeypatch.setattr("mha_haiku.subjects.entry_points.train_observed", recorded)
    assert commands.run(["train", *typed, "--compilation_cache="]) == 2
    assert read == [f"{pathlib.Path('evil.py').resolve()}:Step"]
    task_files._loaded.clear()
    with pytest.raises(ConfigError, match="would execute"):
        mh.load("stranger")  # the consent ended with the command


def test_a_run_of_a_task_of_the_project_opens_anywhere_without_permission(
    make_config, monkeypatch
):
    config = configuration.default_config("markov_chains")
    model = make_config(model__family="causal", model__embedding__max_length=64).model
    tiny_runs.write_untrained("run", config.replace(model=model.to_json()))
    # A file of that path in the working directory is another.
    impostor = pathlib.Path("configs/tasks/markov_chains.py")
    impostor.parent.mkdir(parents=True)
    impostor.write_text("open('mark', 'a').close()")
    # As in a process that has executed no file yet.
    monkeypatch.setattr(task_files, "_loaded", {})
    monkeypatch.setattr(task_files, "of_project", task_files.of_project.__wrapped__)
    run = mh.load("run")
    assert run.config.task.name == run.task.name == "markov_chains"
    assert not pathlib.Path("mark").exists()
    for name in ("../tasks/markov_chains", "configs/tasks/markov_chains", "__init__"):
        with pytest.raises(ConfigError, match="config.task.name must be one of"):
            tasks.of_name(name)


def test_a_task_of_the_project_imported_from_its_file_has_its_short_name():
    file = importlib.import_module("configs.tasks.markov_chains")
    config = runs.default_config(file.MarkovChains(num_tokens=4))
    assert config.task.to_json()["name"] == "markov_chains"
    assert configuration.make_task(config).num_tokens == 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Same(tasks.Task):
    """The target is the token; fields are what may be wrong."""

    sequence_length: int = 6
    num_tokens: int | None = 5
    num_classes: int = 5
    levels: str = "accuracy loss"
    length: int = 6
    largest: int = 5
    dtype: str = "float32"

    @property
    def baseline(self):
        return dict.fromkeys(self.levels.split(), 0.2)

    def example(self, key, data):
        inputs = jnp.arange(self.length) % self.largest
        return tasks.Example(inputs, inputs, jnp.ones(6, self.dtype))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"levels": "loss"}, ["baseline must have accuracy and loss"]),
        ({"num_tokens": None}, [r"inputs must be floats \(6, None\), got int32"]),
        (
            {"length": 5, "dtype": "int32"},
            [r"inputs .* \(6,\), got int32 of shape \(5,\)", "targets", "weights"],
        ),
        ({"largest": 6}, ["inputs .* num_tokens, 5, got 0 to 5", "targets .* 0 to 5"]),
    ],
)
def test_all_that_is_wrong_with_a_task_is_told_at_once(changes, messages):
    with pytest.raises(ConfigError) as raised:
        tasks.check("Same", Same(**changes))
    for message in messages:
        assert re.search(message, str(raised.value)), (message, str(raised.value))


def test_an_error_of_our_own_is_not_the_users():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Fails(Same):
        def example(self, key, data):
            raise KeyError("a part")

    with pytest.raises(ConfigError, match="Fails raised KeyError: 'a part'"):
        tasks.check("Fails", Fails())
    with pytest.raises(KeyError, match="a part"):
        tasks.check("Fails", Fails(), is_own=False)


def test_the_documentation_of_a_task_is_enough_to_write_one():
    names = {"dataclasses": dataclasses, "jax": jax, "jnp": jnp}
    exec(docstring.code_of(tasks.Task), names)
    assert tasks.check("Larger", names["Larger"]()).inputs.shape == (2,)
    with pytest.raises(TypeError, match="got the class Same"):
        mh.train(Same, "no_folder")


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
    assert config.task.name == f":{Inner.__qualname__}"
    assert configuration.make_task(config) == Inner(sequence_length=4)
    reverse = tasks.make("reverse", sequence_length=3, num_tokens=4)
    assert configuration.with_task(config, reverse).task.name == "reverse"
    with pytest.raises(TypeError, match="task must be a mha_haiku.tasks.Task"):
        runs.train(make_config(), "other", task="reverse")
    with pytest.raises(ConfigError, match="given in Python"):
        tasks.options(":Other")
