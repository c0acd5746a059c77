"""Faults injected for real, a few of each; the script itself injects the rest."""

import subprocess
import sys

import pytest

from scripts import check_reliability


@pytest.mark.slow
# What needs processes of its own; of the others there are tests within one.
@pytest.mark.parametrize("name", ["kills", "signals"])
def test_runs_survive(name):
    done = subprocess.run(
        [sys.executable, check_reliability.__file__, "--quick", f"--only={name}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    if "left out" in line:
        pytest.skip(line)
    good, count = line.split()[-3::2]
    assert good == count


def test_unknown_line_is_refused(capsys):
    assert check_reliability.run(["check_reliability", "--only=kils"]) == 2
    told = capsys.readouterr().err
    assert "Did you mean 'kills'?" in told
    assert len(told.splitlines()) <= 2
