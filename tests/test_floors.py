"""A file imports only from lower floors; setup.cfg says which these are."""

import pathlib
import shutil
import subprocess
import sys

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_LINT = (
    "import sys, importlinter.cli as cli;"
    "sys.exit(cli.lint_imports(no_cache=True, no_logo=True))"
)


def _lint(folder: pathlib.Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", _LINT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_no_file_imports_from_its_own_floor_or_a_higher_one():
    result = _lint(_REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "file, line, contract",
    [
        ("mha_haiku/masks/stray.py", "import mha_haiku.models", "lower floors only"),
        (
            "mha_haiku/tasks/stray.py",
            "from mha_haiku import masks",
            "lower floors only",
        ),
        ("mha_haiku/stray.py", "", "lower floors only"),
        ("mha_haiku/modules/stray.py", "import mha_haiku as mh", "own face"),
        ("mha_haiku/tasks/stray.py", "import haiku", "Tasks know no model"),
        ("mha_haiku/report/stray.py", "import jax", "never run a model"),
        ("configs/stray.py", "import experiments.train", "not on each other"),
    ],
)
def test_a_stray_import_breaks_a_contract(tmp_path, file, line, contract):
    for package in ("mha_haiku", "experiments", "configs"):
        shutil.copytree(
            _REPOSITORY / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(_REPOSITORY / "setup.cfg", tmp_path)
    (tmp_path / file).write_text(f"{line}\n")
    result = _lint(tmp_path)
    assert result.returncode == 1
    broken = [text for text in result.stdout.splitlines() if text.endswith("BROKEN")]
    assert any(contract in text for text in broken), result.stdout
