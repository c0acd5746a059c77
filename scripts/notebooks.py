"""Executes the notebooks of experiments/notebooks, and stores their outputs.

Run: python scripts/notebooks.py
     python scripts/notebooks.py --only=1_first_look --check

Each runs in an empty folder, with a separate kernel. It must finish, with outputs below
1 MB and without a path of this machine. --check stores nothing.
"""

import os
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mha_haiku import commands  # noqa: E402

FOLDER = ROOT / "experiments" / "notebooks"
MOST_BYTES = 1_000_000

# Say how programs are compiled.
_COMPILING = (
    "JAX_COMPILATION_CACHE",
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_PERSISTENT_CACHE",
    "XLA_FLAGS",
)


def main(*, only: str = "", check: bool = False) -> int:
    """Runs the notebooks, and prints a line for each.

    Args:
      only: Name of one notebook; all if left out.
      check: Run them without storing their outputs.
    """
    from mha_haiku.core import checks

    paths = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if only:
        with checks.user_mistakes():
            checks.choice("--only", only, paths)
        paths = {only: paths[only]}
    faults = []
    for name, path in paths.items():
        start = time.perf_counter()
        text = executed(path, check=check)
        seconds = time.perf_counter() - start
        found = complaints(text)
        print(f"{name:24} {seconds:5.0f} s {len(text.encode()):9,} bytes", *found)
        faults += found
        if not found and not check:
            path.write_text(text, encoding="utf-8")
    return int(bool(faults))


def executed(path: pathlib.Path, *, check: bool) -> str:
    """Executes a notebook, and returns the text of its file."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
        ).execute(env=_environment(check))
    # What differs between machines says nothing.
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    # Paths in the folder, which is gone, as paths from it.
    return nbformat.writes(notebook).replace(f"{folder}/", "") + "\n"


def complaints(text: str) -> list[str]:
    """Returns the faults of an executed notebook."""
    found = []
    if len(text.encode()) >= MOST_BYTES:
        found.append(f"has {len(text.encode()):,} bytes, of {MOST_BYTES:,} at most")
    places = {str(ROOT), sys.prefix, tempfile.gettempdir(), str(pathlib.Path.home())}
    for place in sorted(places):
        before, named, after = text.partition(f"{place}/")
        if named:
            found.append(f"names a place: {before[-40:]}{named}{after[:80]}")
    return found


def _environment(check: bool) -> dict[str, str]:
    """Returns a user's environment: this repository, and no setting of tests.

    A check keeps settings that make tests compile faster, as it stores no outputs.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_"))
        or (check and name.startswith(_COMPILING))
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


if __name__ == "__main__":
    sys.exit(commands.program(main, __doc__)(sys.argv))
