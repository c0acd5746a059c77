"""`--help` of every script."""

import importlib
import pathlib
import re

import pytest

from experiments import dump_attention, shared_flags

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments"
SCRIPTS = [path.stem for path in _FOLDER.glob("*.py") if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_tells_what_the_script_does_and_every_flag(name, capsys):
    script = importlib.import_module(f"experiments.{name}")
    assert script.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert script.__doc__.splitlines()[0] in out
    for flag in script.FLAGS:
        assert f"--{flag}" in out


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_that_a_script_ends_without_are_marked_as_required(name, capsys):
    script = importlib.import_module(f"experiments.{name}")
    assert script.run([name, "--help"]) == 0
    entries = re.split(r"\n  --", capsys.readouterr().out)
    required = [x.partition(":")[0] for x in entries if "(required)" in x]
    given = [f"--{flag}=x" for flag in required]
    for i, flag in enumerate(required):
        assert script.run([name, *given[:i], *given[i + 1 :]]) == 2
        assert f"--{flag}=... is missing" in capsys.readouterr().err
    assert ("workdir" in required) == (name not in ("train", "reproduce"))


def test_flags_of_several_processes_are_a_group_at_the_end(capsys):
    assert dump_attention.run(["dump_attention", "--help"]) == 0
    before, _, group = capsys.readouterr().out.partition("With several processes")
    assert before.index("Run:") < before.index("Flags:")
    for flag in shared_flags.DISTRIBUTED:
        assert f"--{flag}:" in group and f"--{flag}:" not in before
    assert set(re.findall(r"--(\w+):", group)) == set(shared_flags.DISTRIBUTED)
