"""A file imports only from lower floors; setup.cfg says which these are."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_LINT = (
    "import sys, importlinter.cli as cli;"
    "sys.exit(cli.lint_imports(no_cache=True, no_logo=True))"
)
# Contract: files that break it, each by one line, and what the report says of them.
_STRAYS = {
    "A module of mha_haiku imports from lower floors only": {
        "mha_haiku/masks/stray.py": "import mha_haiku.models",
        "mha_haiku/tasks/stray.py": "from mha_haiku import masks",
        "mha_haiku/training/stray.py": "import mha_haiku.heads",
        "mha_haiku/training/checkpoint.py": "import mha_haiku.runs",
        "mha_haiku/runs/stray.py": "import mha_haiku.studies",
        "mha_haiku/viewing/stray.py": "import mha_haiku.studies",
        "mha_haiku/studies/papers.py": "import mha_haiku.claims",
        "mha_haiku/stray.py": "",
    },
    "Only experiments and configs import the package's own face": {
        "mha_haiku/modules/stray.py": "import mha_haiku as mh",
    },
    "The core imports no wing": {
        "mha_haiku/modules/kernels.py": "import mha_haiku.attention.fused",
        "mha_haiku/positions/ring.py": "import mha_haiku.attention.sharded",
    },
    "Experiments and configs stand on mha_haiku, and not on each other": {
        "configs/stray.py": "import experiments.train",
        "experiments/stray.py": "import configs.reverse",
    },
    "Training and its loop know no laboratory": {
        "mha_haiku/runs/measures.py": "import mha_haiku.heads",
        "mha_haiku/training/measures.py": "import mha_haiku.heads",
    },
    "Tasks know no model": {"mha_haiku/tasks/network.py": "import haiku"},
    "Reports are made from saved arrays and never run a model": {
        "mha_haiku/report/stray.py": "import jax",
        "mha_haiku/report/predictions.py": "import mha_haiku.models",
    },
}


def _lint(folder: pathlib.Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", _LINT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_no_file_imports_from_its_own_floor_or_a_higher_one():
    result = _lint(_REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What is said of a copy of the packages in which every contract is broken."""
    folder = tmp_path_factory.mktemp("strays")
    for package in ("mha_haiku", "experiments", "configs"):
        shutil.copytree(
            _REPOSITORY / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(_REPOSITORY / "setup.cfg", folder)
    for files in _STRAYS.values():
        for file, line in files.items():
            (folder / file).write_text(f"{line}\n")
    result = _lint(folder)
    assert result.returncode == 1
    return result.stdout


def test_every_contract_has_a_stray_that_breaks_it(report):
    broken = re.findall(r"^(.+) BROKEN\b", report, re.MULTILINE)
    assert sorted(broken) == sorted(_STRAYS), report
    assert " KEPT" not in report


@pytest.mark.parametrize(
    ("contract", "file"),
    [(contract, file) for contract, files in _STRAYS.items() for file in files],
)
def test_a_stray_import_is_named_under_its_contract(report, contract, file):
    # After the summary a broken contract has its name, underlined, and what breaks it.
    sections = re.split(r"\n(.+)\n-{5,}\n", report)
    text = dict(zip(sections[1::2], sections[2::2], strict=True))[contract]
    assert re.search(rf"\b{file.removesuffix('.py').replace('/', '.')}\b", text), text


def test_imports_by_name_reach_only_parts_of_the_same_package():
    # Import-linter does not see them.
    for file in (_REPOSITORY / "mha_haiku").rglob("*.py"):
        for name in re.findall(r"import_module\(\s*(.*)", file.read_text("utf-8")):
            assert name.startswith('f"{__name__}.'), file
