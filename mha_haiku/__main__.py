"""Runs a script: `python -m mha_haiku train --config=configs/reverse.py`.

The wheel has the scripts of `experiments`, and `configs`, inside of this package, as
setup.py says. In a checkout the same command runs the scripts next to the package.
"""

import ast
import pathlib
import runpy
import sys
from collections.abc import Sequence

_PACKAGE = pathlib.Path(__file__).resolve().parent
_IS_INSTALLED = (_PACKAGE / "experiments").is_dir()
_FOLDER = (_PACKAGE if _IS_INSTALLED else _PACKAGE.parent) / "experiments"


def main(argv: Sequence[str]) -> int | None:
    """Runs the script that the first argument names, which ends the process.

    Args:
      argv: The command line, with the program's name first.

    Returns:
      The exit status where no script was run: 0 after the list of scripts, else 2.
    """
    scripts = _scripts()
    if len(argv) < 2 or argv[1] in ("--help", "-h"):
        width = max(map(len, scripts), default=0)
        print("python -m mha_haiku SCRIPT [FLAGS]; --help shows the flags of a script.")
        print(*(f"  {name:{width}}  {scripts[name]}" for name in scripts), sep="\n")
        return 0
    name, *flags = argv[1:]
    if name not in scripts:
        print(f"error: there is no script {name!r}.", file=sys.stderr)
        print(f"The scripts are {', '.join(scripts)}.", file=sys.stderr)
        return 2
    package = f"{_PACKAGE.name}.experiments"
    if not _IS_INSTALLED:
        package = "experiments"
        sys.path.insert(0, str(_FOLDER.parent))
    sys.argv = [name, *flags]
    runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=True)


def _scripts() -> dict[str, str]:
    """Returns the first line of each script's docstring, by the script's name."""
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
