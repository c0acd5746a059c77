"""`--help` of every script."""

import importlib
import pathlib

import pytest

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
