"""The run for a GPU, in small on a CPU: all checks, all measurements, four pages."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from scripts import on_gpu


@pytest.mark.slow
def test_all_parts_run_in_small(tmp_path):
    for package in ("torch", "transformers", "torchax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    command = [sys.executable, on_gpu.__file__, "--cpu", f"--out={tmp_path}"]
    # As a user starts it: only tests refuse to promote ranks.
    environment = {**os.environ, "JAX_NUMPY_RANK_PROMOTION": "allow"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "on_gpu.json").read_text())
    assert [part["ended"] for part in report["parts"]] == ["done"] * 13
    records = [record for part in report["parts"] for record in part["records"]]
    checked = [r for r in records if "error" in r]
    assert len(checked) > 60 and all(r["is_right"] for r in checked)
    pages = {path.stem for path in pathlib.Path(tmp_path).glob("*.html")}
    assert pages == {"map", "run", "torch", "importance"}
    table = (tmp_path / "on_gpu.md").read_text()
    assert "2 layers, width 24" in table and "GPT-2 small" not in table


def test_a_check_sees_a_wrong_number_a_nan_and_another_shape(tmp_path):
    report = on_gpu.Report(tmp_path, "part", is_small=True)
    for actual in ([1.0, 2.0], [1.0, 2.1], [1.0, float("nan")], [1.0]):
        report.check("numbers", actual, [1.0, 2.0], 0.01)
    lines = (tmp_path / "part.jsonl").read_text().splitlines()
    is_right = [json.loads(line)["is_right"] for line in lines]
    assert is_right == [True, False, False, False]
