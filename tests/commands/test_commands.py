"""Every command: its `--help`, its required flags, and how a new one is made."""

import pathlib
import re
import runpy
import shutil
import sys
from collections.abc import Sequence

import pytest

import mha_haiku as mh
from experiments import reproduce  # noqa: F401  (enters its command)
from mha_haiku import commands, records
from mha_haiku.commands import config_files, signatures, table
from mha_haiku.core import checks
from mha_haiku.subjects.subject import VERBS, Subject
from tests.tiny_runs import write_untrained

COMMANDS = commands.commands()
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCRIPTS = [path.stem for path in (_ROOT / "experiments").glob("[!_]*.py")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_the_command_does_and_explains_every_flag(name, capsys):
    assert commands.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(COMMANDS[name].description)
    for option in COMMANDS[name].options:
        if option.kind is not signatures.Overrides:
            assert f"--{option.name}: {option.meaning[:40]}" in out and option.meaning


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_that_a_command_ends_without_are_marked_as_required(name, capsys):
    assert commands.run([name, "--help"]) == 0
    entries = re.split(r"\n  --", capsys.readouterr().out)
    required = [x.partition(":")[0] for x in entries if "(required)" in x]
    given = [f"--{flag}=x" for flag in required]
    for i, flag in enumerate(required):
        assert commands.run([name, *given[:i], *given[i + 1 :]]) == 2
        assert f"--{flag}=... is missing" in capsys.readouterr().err
    assert ("workdir" in required) == (name not in ("train", "reproduce"))


@pytest.mark.parametrize("script", _SCRIPTS)
def test_a_script_runs_a_command_and_its_example_has_flags_of_it(
    script, capsys, monkeypatch
):
    path = _ROOT / "experiments" / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    text = path.read_text("utf-8")
    assert text.splitlines()[0].strip('"') == out.splitlines()[0]
    (example,) = re.findall(rf"^Run: python -m experiments\.{script} (.*)", text, re.M)
    for flag in re.findall(r"--(\w+)", example):
        assert f"\n  --{flag}: " in out


def test_the_list_has_a_line_for_each_and_suggests_one(capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.choose(["mha_haiku"])
    out = capsys.readouterr().out
    assert "\n  train  " in out and "\n  head_importance, importance  " in out
    with pytest.raises(SystemExit, match="2"):
        commands.choose(["mha_haiku", "tain"])
    told = capsys.readouterr().err
    assert re.fullmatch("error: .*'tain'.*'train'.*\n.* train\\.\n", told)


def _option_names(name):
    return {option.name for option in COMMANDS[name].options}


_NEW_VERB = '''"""Counts the parameters of each kind.

Run: python -m experiments.count_parameters --workdir=runs/reverse --least=100
"""

import dataclasses
from collections.abc import Sequence

from mha_haiku import commands, records
from mha_haiku.records import Result
from mha_haiku.records.tables import Column, Table
from mha_haiku.subjects.subject import Subject, verb


@dataclasses.dataclass
class Counts(Result):
    """Numbers of parameters."""

    title: str
    counts: dict
    file_name = "counts"
    picture = None

    def table(self) -> Table:
        rows = [{"name": x, "count": y} for x, y in self.counts.items()]
        return Table([Column("name"), Column("count")], rows)

    def save(self, folder, formats=()):
        return super().save(folder, formats=())


@verb(command="count_parameters", folder="counts")
def parameter_counts(
    subject: Subject, *, least: int = 1, only: Sequence[str] | None = None
) -> Counts:
    """Counts the parameters of each kind.

    Args:
      subject: The model.
      least: The smallest count
        that is shown.
      only: Names of parameters.
    """
    counts = {}
    for module in subject.params.values():
        for name, x in module.items():
            counts[name] = counts.get(name, 0) + x.size
    shown = {x: n for x, n in counts.items() if n >= least and x in (only or counts)}
    return Counts(subject.title, shown)


if __name__ == "__main__":
    commands.main("count_parameters")
'''


def test_a_new_verb_in_one_file_is_a_method_a_command_a_line_and_a_file(
    tmp_path, make_config, monkeypatch, capsys
):
    folder = write_untrained(tmp_path / "run", make_config())
    script = tmp_path / "count_parameters.py"
    script.write_text(_NEW_VERB)
    monkeypatch.setattr(sys, "argv", [str(script), f"--workdir={folder}", "--only=w,b"])
    try:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(script), run_name="__main__")
        out = capsys.readouterr().out
        assert (folder / "counts/counts.csv").read_text().startswith("name,count\nb,")
        assert str(folder / "counts/counts.csv") in out
        found = mh.load(folder).parameter_counts(only=["b"])
        assert list(found.counts) == ["b"] and f"{found.counts['b']}" in out
        assert commands.run(["parameter_counts", "--help"]) == 0
        out = capsys.readouterr().out
        assert "--least: The smallest count that is shown. (default: 1)\n" in out
        assert "--only: Names of parameters.\n" in out
        with pytest.raises(SystemExit, match="0"):
            commands.choose(["mha_haiku", "--help"])
        line = "count_parameters, parameter_counts +Counts the parameters of each kind."
        assert re.search(rf"^  {line}$", capsys.readouterr().out, re.MULTILINE)
    finally:
        del VERBS["parameter_counts"], Subject.parameter_counts


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a run, not to be changed."""
    config = config_files.load("configs/reverse.py")
    return write_untrained(tmp_path_factory.mktemp("runs") / "run", config)


@pytest.fixture
def copied(stored, tmp_path, monkeypatch):
    """The folder of a run, next to a file."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    return shutil.copytree(stored, tmp_path / "run")


@pytest.mark.parametrize(
    "name", [x for x in sorted(COMMANDS) if {"out", "workdir"} <= _option_names(x)]
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    name, copied, capsys
):
    out = "file/below"
    own = {"prune_heads": ["--keep=0.5"], "sweep": ["--keep=0.5"]}.get(name, [])
    assert commands.run([name, f"--workdir={copied}", f"--out={out}", *own]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (mistake,) = told.err.splitlines()  # and nothing was compiled
    assert out in mistake


@pytest.mark.parametrize(
    ("name", "flags", "taken"),
    [
        ("head_statistics", [], "attention"),
        ("dump_attention", [], "attention"),
        ("rollout", [], "attention"),
        ("prune_heads", ["--sweep"], "heads"),
        ("prune_heads", ["--keep=0.5"], "../run_pruned"),
        ("learn_gates", [], "../run_gates"),
        ("learn_gates", [], "../run_gates/gated"),
    ],
)
def test_a_file_in_the_way_of_results_is_refused_before_the_work(
    name, flags, taken, copied, capsys
):
    path = copied / taken
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert commands.run([name, f"--workdir={copied}", *flags]) == 2
    (mistake,) = capsys.readouterr().err.splitlines()
    assert path.resolve().name in mistake
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dump_attention", "index.html"),
        ("dump_attention", "layer_07.png"),
        ("head_statistics", "head_statistics.csv"),
        ("head_importance", "head_importance.npz"),
        ("circuit", "circuit.csv"),
        ("rollout", "anything.txt"),
    ],
)
def test_out_with_files_of_others_is_refused_before_the_work(
    name, file, copied, capsys, tmp_path
):
    path = tmp_path / "out" / file
    path.parent.mkdir()
    path.write_text("mine")
    out = f"--out={path.parent}"
    assert commands.run([name, f"--workdir={copied}", out]) == 2
    told = capsys.readouterr()
    mistake, *_ = told.err.splitlines()  # and nothing was compiled
    assert told.out == "" and mistake.endswith(f"got one with {file!r}.")
    assert [x.name for x in path.parent.iterdir()] == [file]
    assert path.read_text() == "mine"


def test_a_result_that_cannot_be_saved_is_printed(tmp_path, capsys):
    class Full(records.Result):
        title, file_name = "what was asked", "answer"

        def text(self):
            return "what was found"

        def save(self, folder, formats):
            raise checks.ConfigError(f"{folder} cannot be written: the disk is full.")

    with pytest.raises(checks.ConfigError, match="the disk is full"):
        table.tell(Full(), tmp_path, ["png"])
    assert capsys.readouterr().out == "what was asked\n\nwhat was found\n"


def _asked(
    *,
    count: int = 3,
    share: float | None = None,
    names: Sequence[str] = ("a", "b"),
    rows: Sequence[int] | None = None,
    layers: Sequence[int | str] | None = None,
    keep: float | Sequence[Sequence[int]] | None = None,
    text: str | None = None,
    measures: str | Sequence[str] | None = None,
    loud: bool = True,
    other: dict | None = None,
    **options: int,
) -> dict:
    return {x: y for x, y in locals().items() if x != "options"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {}),
        (["--count=-2", "--share", "1e-3"], {"count": -2, "share": 1e-3}),
        (["--names=x, y"], {"names": ["x", "y"]}),
        (["--names="], {"names": []}),
        (["--rows=4,1"], {"rows": [4, 1]}),
        (["--layers=0,cross.2,decoder"], {"layers": [0, "cross.2", "decoder"]}),
        (["--keep=0.5", "--noloud"], {"keep": 0.5, "loud": False}),
        (["--measures=a,b"], {"measures": ["a", "b"]}),
        (["--measures=a"], {"measures": ["a"]}),
        (["--text=a,b=c", "--loud=false"], {"text": "a,b=c", "loud": False}),
    ],
)
def test_flags_have_the_types_of_the_signature(words, wanted):
    options = signatures.options(_asked)
    assert "other" not in [option.name for option in options]
    given = signatures.parse(options, words)
    default = {"names": ("a", "b"), "count": 3, "loud": True}
    shown = {x: y for x, y in signatures.call(_asked, given, None).items() if y}
    assert shown == {x: y for x, y in {**default, **wanted}.items() if y}


def test_a_required_parameter_needs_a_type_that_a_flag_has():
    def asked(mapping: dict): ...

    with pytest.raises(TypeError, match="mapping: dict must be of a type"):
        signatures.options(asked)
