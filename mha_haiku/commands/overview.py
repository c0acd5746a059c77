"""The list of all commands, which is read off their files: it needs no JAX."""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

from mha_haiku.core import checks

_HELP = re.compile("--?help|-h")
_PACKAGE = pathlib.Path(__file__).parents[1]
_FOLDERS = "commands", "subjects/verbs"  # of files with decorated functions


def choose(argv: Sequence[str]) -> None:
    """Runs the command that the first flag names, and ends the process.

    Args:
      argv: The command line, with the program's name first.
    """
    if len(argv) < 2 or _HELP.fullmatch(argv[1]):
        print("python -m mha_haiku COMMAND [FLAGS]; --help shows a command's flags.")
        lines = {", ".join(names): line for names, line in sorted(_commands())}
        width = max(map(len, lines))
        for names, line in lines.items():
            print(f"  {names:{width}}  {line}")
        sys.exit(0)
    names = sorted({name for names, _ in _commands() for name in names})
    if argv[1] not in names:
        nearest = checks.nearest(argv[1], names)
        print(f"error: there is no command {argv[1]!r}.{nearest}", file=sys.stderr)
        print(f"The commands are {', '.join(names)}.", file=sys.stderr)
        sys.exit(2)
    from mha_haiku import commands  # and JAX

    commands.end(commands.run(argv[1:]))


def _commands() -> Iterator[tuple[list[str], str]]:
    """Yields the names of each command, and the first line of its docstring.

    A verb with a command has two: `head_importance` is `importance` too.
    """
    if table := sys.modules.get(f"{__package__}.table"):  # with a user's commands
        entries = table.commands()
        for entry in {id(x): x for x in entries.values()}.values():
            names = [name for name, x in entries.items() if x is entry]
            yield names, entry.description.partition("\n")[0]
        return
    files = (x for folder in _FOLDERS for x in (_PACKAGE / folder).glob("*.py"))
    for file in files:
        for function in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for decorator in map(ast.unparse, function.decorator_list):
                as_verb = re.match(r"verb\(command='(\w+)'", decorator)
                if as_verb or decorator == "command":
                    names = {function.name, *(as_verb.groups() if as_verb else ())}
                    line = (ast.get_docstring(function) or "").partition("\n")[0]
                    yield sorted(names), line
