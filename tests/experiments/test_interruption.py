"""Ctrl-C before anything runs."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_ctrl_c_while_libraries_are_imported_is_told_in_a_line(tmp_path):
    interrupting = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfail"
    (tmp_path / "jax.py").write_text(interrupting)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--help"],
        cwd=_ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (130, b"Interrupted.\n")
