"""Runs of a benchmark as a user starts it."""

import json
import pathlib
import subprocess
import sys

import pytest

_SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def quick_run(tmp_path):
    """A function of a script and arguments: what a quick run prints, and its duels."""

    def run(script, *arguments):
        path = tmp_path / "samples.json"
        done = subprocess.run(
            [
                sys.executable,
                _SCRIPTS / script,
                "--quick",
                f"--json={path}",
                *arguments,
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "these times mean nothing" in done.stdout
        return done.stdout, json.loads(path.read_text())["duels"]

    return run
