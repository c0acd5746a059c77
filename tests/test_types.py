"""Annotations hold: pyright, of the version in setup.cfg, finds no error."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_pyright_finds_no_error():
    pytest.importorskip("pyright", reason="needs pip install -e '.[test]'")
    if sys.version_info[:2] != (3, 11):
        pytest.skip(
            "types are checked with the JAX of Python 3.11; others annotate otherwise"
        )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
