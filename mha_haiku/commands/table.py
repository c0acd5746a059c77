"""The table of commands, and functions to run one.

A verb of `Subject` can be a command directly. Other commands, such as training, are
functions that `command` enters in the table.
"""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mha_haiku.commands import config_files, groups, process, signatures
from mha_haiku.commands.signatures import Option
from mha_haiku.core import checks, outputs
from mha_haiku.subjects.subject import Verb
from mha_haiku.subjects.verbs import VERBS
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import files

_ALWAYS = [
    Option("debug", bool, False, "Show the traceback of an error."),
    Option("help", bool, False, "Show this and end."),
]
_HELP = re.compile("--?help|-h")
_CONFIG = re.compile("--?config=(.+)")
_DEBUG = re.compile("--?debug(=(true|t|1))?", re.IGNORECASE)


class Command(NamedTuple):
    """A command with a line in `python -m mha_haiku --help`."""

    function: Callable[..., int | None]  # returns an exit status, or None
    description: str  # before the flags in `--help`
    options: list[Option]


_commands: dict[str, Command] = {}


def command(function: Callable) -> Callable:
    """Enters a function in the table of commands, under its name; a decorator."""
    _commands[function.__name__] = _of_function(function)
    return function


def commands() -> dict[str, Command]:
    """Returns the commands by name, in the order of the names.

    A verb with a command has two: `head_importance` is `importance` too.
    """
    result = dict(_commands)
    for name, verb in VERBS.items():
        if verb.command:
            result[name] = result[verb.command] = _of_verb(verb)
    return dict(sorted(result.items()))


def place(out: str | None, workdir: str, name: str) -> pathlib.Path:
    """Returns the folder to write to: `out`, or by default `name` in a run's folder.

    Before the work: ConfigError if it cannot be written, or `out` holds files that no
    command has written.
    """
    default = pathlib.Path(workdir, name)
    folder = checks.as_path(out or default)

    if folder.resolve() != default.resolve():  # which is the run's
        outputs.check("--out", folder)
    files.check_writable("workdir" if out is None else "--out", folder)
    return folder


def tell(result: Any, folder: str | os.PathLike, formats: Sequence[str]) -> None:
    """Prints a verb's result; writes its files, and prints their paths."""
    print(result.title, result.text(), sep="\n\n")
    kinds = ".csv", *result.writers(), *(f".{kind}" for kind in formats)
    outputs.claim(folder, (f"{result.file_name}{kind}" for kind in kinds))
    written = result.save(os.path.join(folder, ""), formats)  # also if it has a dot
    print("\nFiles:", *written, sep="\n  ")


def main(name: str) -> None:
    """Runs a command with the flags of this process, which it ends."""
    end(run([name, *sys.argv[1:]]))


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process.

    Args:
      argv: The command's name, and its flags.

    Returns:
      The exit status: 0, 1, 2 or 130.
    """
    name, *arguments = argv
    return _ended(commands()[name], arguments)


def program(
    function: Callable, description: str = ""
) -> Callable[[Sequence[str]], int]:
    """Makes a program of a function that is not in the table of commands.

    Args:
      function: The function.
      description: Text of `--help` before the flags. Defaults to the docstring.

    Returns:
      A function from the command line, with the program's name first, to the status.
    """
    entry = _of_function(function, description.strip())
    return lambda argv: _ended(entry, argv[1:])


def _of_function(function: Callable, description: str = "") -> Command:
    description = description or signatures.description(function)
    return Command(function, description, signatures.options(function))


def _of_verb(verb: Verb) -> Command:
    """Makes a command that calls a verb, prints the answer and writes its files."""
    of_subject = functools.partial(verb.function, None)  # without the subject

    @signatures.options_of(of_subject)
    def ask(
        *,
        run: groups.Run,
        out: str | None = None,
        pictures: groups.Pictures,
        processes: groups.Processes,
        **options: Any,
    ) -> None:
        subject = run.subject()
        folder = place(out, run.workdir, verb.folder)
        with checks.user_mistakes():  # a verb says by ValueError what it cannot answer
            result = verb.function(subject, **options)
        if cluster.leave():
            tell(result, folder, pictures.format)

    first, *others = signatures.description(of_subject).split("\n")
    example = ["", f"Run: python -m mha_haiku {verb.command} --workdir=..."]
    out_line = f"Args:\n  out: Folder to write to; default: <workdir>/{verb.folder}."
    ask.__doc__ = "\n".join([first, *example, *others, "", out_line])
    return _of_function(ask)


def _ended(entry: Command, arguments: Sequence[str]) -> int:
    return process.ended(
        functools.partial(_run, entry, arguments),
        debug=any(map(_DEBUG.fullmatch, arguments)),
    )


def _run(entry: Command, arguments: Sequence[str]) -> int | None:
    options = entry.options + _ALWAYS
    if any(map(_HELP.fullmatch, arguments)):
        print(_help(entry, options, arguments), flush=True)
        return 0
    values = signatures.parse(options, arguments)
    return signatures.call(entry.function, values, lambda group: group.ready())


def _help(entry: Command, options: list[Option], arguments: Sequence[str]) -> str:
    lines = [entry.description, *signatures.help_lines(options)]
    if not any(option.kind is signatures.Overrides for option in options):
        return "\n".join(lines)
    named = [match[1] for word in arguments if (match := _CONFIG.fullmatch(word))]
    if named:
        lines += ["", f"Fields of {named[-1]}, with their values there:"]
        lines += [f"  {line}" for line in config_files.describe(named[-1])]
    else:
        lines += ["", "Configs; with --config=<one of them>, --help shows its fields:"]
        for path in config_files.available():
            lines.append(f"  {path}: {config_files.title(path)}")
    return "\n".join(lines)


def end(status: int) -> None:
    """Ends the process."""
    if status == 130:  # XLA, interrupted while it compiled, may crash as it clears up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
