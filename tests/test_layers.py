"""A file imports only from lower layers; setup.cfg says which these are."""

import pathlib
import re
import subprocess
import sys

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_LINT = (
    "import sys, importlinter.cli as cli;"
    "sys.exit(cli.lint_imports(no_cache=True, no_logo=True))"
)


def test_no_file_imports_from_its_own_floor_or_a_higher_one():
    command = [sys.executable, "-c", _LINT]
    result = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_imports_by_name_reach_only_parts_of_the_same_package():
    # Import-linter does not see them.
    for file in (_REPOSITORY / "mha_haiku").rglob("*.py"):
        for name in re.findall(r"import_module\(\s*(.*)", file.read_text("utf-8")):
            assert name.startswith('f"{__name__}.'), file
