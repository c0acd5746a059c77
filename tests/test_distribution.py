"""The wheel has all that is needed without a checkout, and takes one name."""

import ast
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import mha_haiku

pytest.importorskip("setuptools")
_ROOT = pathlib.Path(__file__).parents[1]
# What a module that is imported only for PyTorch modules may import.
_OPTIONAL = {
    f"mha_haiku/interop/torch_modules/{name}.py": {"torch", "torchax"}
    for name in ("torch_arrays", "torch_memory")
}
# Prints where each file of the wheel is from, as setuptools finds it, without building.
_LIST = """
import json, setuptools

distribution = setuptools.Distribution(dict(script_name=""))
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
found = {
    f"{package.replace('.', '/')}/{module}.py": file
    for package, module, file in command.find_all_modules()
}
for package, source, _, names in command.data_files:
    for name in names:
        found[f"{package.replace('.', '/')}/{name}"] = f"{source}/{name}"
print(json.dumps(found))
"""


@functools.cache
def _wheel() -> dict[str, pathlib.Path]:
    """Returns the file in the repository of each file in the wheel."""
    done = _run([sys.executable, "-c", _LIST], cwd=_ROOT)
    return {name: (_ROOT / file).resolve() for name, file in json.loads(done).items()}


def _run(command, cwd, **environment) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files(folder: str) -> set[pathlib.Path]:
    return {
        path
        for path in (_ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }


def _imports(node: ast.AST):
    """Yields the top-level names of imports that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (name.name.partition(".")[0] for name in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield child.module.partition(".")[0]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from _imports(child)


def test_wheel_has_every_file_of_the_package():
    sources = set(_wheel().values())
    assert not _files("mha_haiku") - sources
    assert _ROOT / "mha_haiku/py.typed" in sources
    order = _ROOT / "mha_haiku/showing/viewer/order.txt"
    viewer = {order.parent / name for name in order.read_text("utf-8").split()}
    assert viewer and not viewer - sources


def test_wheel_has_every_config():
    assert _files("configs") <= set(_wheel().values())


def test_the_citation_is_of_this_version():
    citation = (_ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {mha_haiku.__version__}\n" in citation


def test_wheel_takes_no_top_level_name_but_its_own():
    assert {name.partition("/")[0] for name in _wheel()} == {"mha_haiku"}


@pytest.mark.slow
def test_whatever_a_module_of_the_wheel_imports_is_a_requirement():
    # Of the names that other tests of this environment could hide.
    text = (_ROOT / "setup.cfg").read_text("utf-8")
    (block,) = re.findall(r"^install_requires =\n((?: +\S.*\n)+)", text, re.MULTILINE)
    required = {re.match(r"[\w-]+", line.strip())[0] for line in block.splitlines()}
    allowed = {"mha_haiku", "jaxlib", *sys.stdlib_module_names}
    for name, packages in importlib.metadata.packages_distributions().items():
        if required & set(packages):
            allowed.add(name)
    strays = {
        (name, imported)
        for name, source in _wheel().items()
        if name.endswith(".py")
        for imported in _imports(ast.parse(source.read_text("utf-8")))
        if imported not in allowed | _OPTIONAL.get(name, set())
    }
    assert not strays


@pytest.mark.slow
def test_wheel_works_without_a_checkout(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1", reason="it builds no wheel")
    source, installed, empty = (tmp_path / name for name in ("source", "at", "empty"))
    for folder in ("mha_haiku", "configs", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__", "*.ipynb", "*.png", "*.jsonl")
        shutil.copytree(_ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, source)
    empty.mkdir()
    build = "import sys; from setuptools import build_meta as b; b.build_wheel('..')"
    _run([sys.executable, "-c", build], source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(installed)
    assert names == set(_wheel())

    run = functools.partial(_run, cwd=empty, PYTHONPATH=str(installed))
    command = [sys.executable, "-m", "mha_haiku"]
    assert "python -m mha_haiku train" in run([*command, "train", "--help"])
    short = [f"--config.training.{name}=4" for name in ("steps", "batch_size")]
    run([*command, "train", "--config=configs/reverse.py", *short])
    assert (empty / "runs/reverse/attention/index.html").exists()
    run([*command, "importance", "--workdir=runs/reverse", "--examples=4"])
    assert (empty / "runs/reverse/heads/head_importance.csv").exists()
    look = (
        "import mha_haiku as mh; mh.tasks.of_name('markov_chains');"
        "mh.load('runs/reverse').maps('3 1 4 1').show().save('maps.html');"
        "print(mh.__file__)"
    )
    told = run([sys.executable, "-c", look])
    assert told.strip() == str(installed / "mha_haiku/__init__.py")
    assert (empty / "maps.html").stat().st_size > 100_000
