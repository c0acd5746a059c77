"""Faults injected for real, a few of each; the script itself injects the rest."""

import pathlib
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/check_reliability.py"


def _check(*arguments):
    return subprocess.run(
        [sys.executable, _SCRIPT, *arguments], capture_output=True, text=True
    )


@pytest.mark.slow
# What needs processes of its own; of the others there are tests within one.
@pytest.mark.parametrize("name", ["kills", "signals"])
def test_runs_survive(name):
    done = _check("--quick", f"--only={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    if "left out" in line:
        pytest.skip(line)
    good, count = line.split()[-3::2]
    assert good == count


@pytest.mark.slow
def test_unknown_line_is_refused():
    done = _check("--only=kils")
    assert done.returncode == 2
    assert "Did you mean 'kills'?" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
