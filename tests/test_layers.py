"""A file imports only from lower layers; setup.cfg says which these are."""

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
    "A package of mha_haiku imports from lower layers only": {
        "mha_haiku/core/strays.py": "import mha_haiku.training",
        "mha_haiku/training/stray.py": "import mha_haiku.lab.heads",
        "mha_haiku/training/runs/measures.py": "import mha_haiku.lab.heads",
        "mha_haiku/lab/stray.py": "import mha_haiku.showing",
        "mha_haiku/showing/stray.py": "import mha_haiku.subjects",
        "mha_haiku/stray.py": "",
    },
    "A module of the core imports from lower layers only": {
        "mha_haiku/core/masks/stray.py": "import mha_haiku.core.models",
        "mha_haiku/core/attention/inputs.py": "import mha_haiku.core.sites",
        "mha_haiku/core/stray.py": "",
    },
    "A module of training imports from lower layers only": {
        "mha_haiku/training/tasks/stray.py": "import mha_haiku.training.runs",
        "mha_haiku/training/checkpoint.py": "import mha_haiku.training.runs",
    },
    "A subject runs none of its verbs, and knows no picture of it": {
        "mha_haiku/subjects/subject.py": "import mha_haiku.subjects.verbs",
    },
    "Only experiments and configs import the package's own face": {
        "mha_haiku/core/modules/stray.py": "import mha_haiku as mh",
    },
    "A module of attention imports from lower layers only": {
        "mha_haiku/core/attention/products.py": "import mha_haiku.core.attention.tiled",
        "mha_haiku/core/attention/stray.py": "",
    },
    "A module of sites imports from lower layers only": {
        "mha_haiku/core/sites/levels.py": "import mha_haiku.core.sites.recognition",
        "mha_haiku/core/sites/stray.py": "",
    },
    "The core imports no optional backend of attention": {
        "mha_haiku/core/modules/ring.py": "import mha_haiku.core.attention.sharded",
    },
    "Experiments and configs stand on mha_haiku, and not on each other": {
        "mha_haiku/subjects/verbs/papers.py": "import experiments.claims",
        "configs/stray.py": "import experiments.train",
        "experiments/stray.py": "import configs.reverse",
    },
    "Tasks know no model": {"mha_haiku/training/tasks/network.py": "import haiku"},
    "Pages and figures are made from records, without the laboratory or models": {
        "mha_haiku/showing/figures.py": "import haiku",
        "mha_haiku/records/tables.py": "import mha_haiku.core.models",
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
    """The report on a copy of the packages in which every contract is broken."""
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
