"""Faults injected for real, a few of each; the script itself injects the rest."""

import subprocess
import sys

import pytest

from scripts import check_reliability


@pytest.mark.slow
def test_runs_survive_kills_and_signals():
    """Faults that need separate processes; others have tests in one process."""
    # In one go, as both begin with the same undisturbed runs.
    done = subprocess.run(
        [sys.executable, check_reliability.__file__, "--quick", "--only=kills,signals"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split()[-3::2] for line in done.stdout.splitlines()]
    assert found == [["3", "3"], ["2", "2"]]


def test_unknown_line_is_refused(capsys):
    assert check_reliability.run(["check_reliability", "--only=kils"]) == 2
    told = capsys.readouterr().err
    assert "Did you mean 'kills'?" in told
    assert len(told.splitlines()) <= 2
