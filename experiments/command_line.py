"""What all scripts share: their flags, the config, and how errors are reported.

A script ends with status 0 when it is done; with 2 after a user's mistake, reported in
at most two lines on stderr; with 1 after a fault, reported in one line; and with 130
when interrupted. A traceback is shown with `--debug` only.

jax and mha_haiku are imported inside functions: `--help` needs neither.
"""

import contextlib
import logging
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from . import config_files, shared_flags

# The extra of setup.cfg that installs a package that only some runs need.
_EXTRAS = {
    "matplotlib": "plots",
    "sklearn": "data",
    "tensorboardX": "tensorboard",
    "tokenizers": "data",
}
# The wheel has this folder inside of mha_haiku, which runs the scripts there.
_IS_INSTALLED = __package__ != "experiments"
_MOST = 2**31 - 1  # the largest integer of any flag
_ADDRESS = re.compile(r"(encoder|decoder|cross)(\.\d{1,9})?")  # of layers of a kind
_MOST_EXAMPLES = 2**20  # more would take too long


def flag_values(table: Mapping[str, tuple[type, Any, str]]) -> flags.FlagValues:
    """Returns the flags of a script, with `--debug` and `--help` added.

    They are not absl's global flags, so that several scripts can be imported together.

    Args:
      table: The type, default and help of each flag; a default of
        `shared_flags.REQUIRED` means that it must be given. Types are `str`, `int`,
        `float`, `bool`, `list` for integers with commas between them, and `"addresses"`
        for integers or the addresses of layers, as "cross.0". With a flag named
        `config`, fields of that config can be overridden by `--config.<field>=value`;
        without it the run in `--workdir` keeps its own.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    own = {
        "debug": (bool, False, "Show the traceback of an error."),
        "help": (bool, False, "Show this and end."),
    }
    for name, (kind, default, text) in {**table, **own}.items():
        is_required = default is shared_flags.REQUIRED
        default = None if is_required else default
        if kind is list:
            flags.DEFINE(_Integers(), name, default, text, flag_values=values)
        elif kind == "addresses":
            flags.DEFINE(_Addresses(), name, default, text, flag_values=values)
        elif kind is int:
            most = _MOST_EXAMPLES if name.endswith("examples") else _MOST
            flags.DEFINE_integer(
                name, default, text, upper_bound=most, flag_values=values
            )
        else:
            _DEFINE[kind](name, default, text, flag_values=values)
        values[name].is_required = is_required
    return values


def run(
    main: Callable[..., int | None],
    values: flags.FlagValues,
    description: str,
    argv: Sequence[str],
) -> int:
    """Runs a script.

    Args:
      main: The script's work; called with the config where `values` has `--config`, and
        with nothing otherwise. Returns an exit status, or None for 0.
      values: The script's flags, from `flag_values`.
      description: The docstring of the script, shown by `--help`.
      argv: The command line, with the program's name first.

    Returns:
      The exit status: 0, 1, 2 or 130.
    """
    try:
        with _warnings_shown():
            return _run(main, values, argv, description) or 0
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        shared_flags.leave(values, 130)
        return 130
    except BrokenPipeError:  # the reader of `... | head` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if values["debug"].value or "--debug" in argv:  # parsed, or not that far
            traceback.print_exc()
        status = _report(error)
        shared_flags.leave(values, status)
        return status


def require(flag: str, value: str | None, hint: str = "") -> None:
    """Raises ConfigError where a flag that must be given was not."""
    if not value:
        from mha_haiku.core import checks

        raise checks.ConfigError(f"--{flag}=... is missing.\n{hint}")


class _Integers(flags.ArgumentParser):
    """Reads `0,2` as [0, 2]."""

    def parse(self, argument: str | list[int]) -> list[int]:
        if not isinstance(argument, str):
            return argument
        try:
            numbers = [int(word) for word in argument.split(",")]
        except ValueError as error:
            raise ValueError("must be integers, as 0,2") from error
        if max(map(abs, numbers)) > _MOST:
            raise ValueError(f"must be integers of at most {_MOST}")
        return numbers


class _Addresses(_Integers):
    """Reads `0,cross.2` as [0, "cross.2"]."""

    def parse(self, argument: str | list[int | str]) -> list[int | str]:
        if not isinstance(argument, str):
            return argument
        words = [word.strip() for word in argument.split(",")]
        try:
            return [
                word
                if _ADDRESS.fullmatch(word)
                else super(_Addresses, self).parse(word)[0]
                for word in words
            ]
        except ValueError as error:
            if "at most" in str(error):
                raise
            raise ValueError("must be integers or layers, as 0,2 or cross.0") from error


_DEFINE = {
    bool: flags.DEFINE_boolean,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def _run(main, values, argv, description) -> int | None:
    values.unparse_flags()
    with_config = "config" in values
    arguments, overrides = _split_overrides(argv) if with_config else (argv, [])
    if {"--help", "-help", "-h"} & set(arguments):
        with contextlib.suppress(flags.Error, ValueError):
            values([word for word in arguments if word != "-h"], known_only=True)
        print(_help(values, description), flush=True)
        return 0
    _parse(values, arguments)
    for name in values:
        if values[name].is_required:
            require(name, values[name].value, values[name].help)
    if not with_config:
        shared_flags.join(values)
        return main()
    config = None
    if not values.config and "workdir" in values and values.workdir:
        config = config_files.of_run(values.workdir)
    if config is None:
        require(
            "config",
            values.config,
            f"It is one of {', '.join(config_files.available())}, or your own.",
        )
        config = config_files.load(values.config)
    config = config_files.override(config, overrides)
    shared_flags.join(values)
    return main(config)


def _split_overrides(argv) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns `argv` without `--config.x.y=value`, and those as pairs (name, value)."""
    arguments, overrides = [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith(("--config.", "-config.")):
            arguments.append(word)
            continue
        name, equals, text = word.lstrip("-").partition("=")
        if not equals:  # `--config.x value`, or only `--config.x`, which is true.
            has_value = words and not words[0].startswith("--")
            text = words.pop(0) if has_value else "true"
        overrides.append((name, text))
    return arguments, overrides


def _parse(values, arguments) -> None:
    from mha_haiku.core import checks

    names = [f"--{name}" for name in values]
    if "config" in values:
        names.append("--config.<field>")
    try:
        rest = values(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        nearest = _nearest_flag(error.flagname, values)
        raise checks.ConfigError(
            f"There is no flag --{error.flagname}.{nearest}\n"
            f"The flags are {', '.join(names)}."
        ) from error
    except RecursionError as error:  # of absl, which compares long names with flags
        raise checks.ConfigError(
            f"There is no flag with so long a name.\nThe flags are {', '.join(names)}."
        ) from error
    except (flags.Error, ValueError) as error:
        raise checks.ConfigError(str(error)) from error
    if rest:
        raise checks.ConfigError(
            f"{rest[0]!r} belongs to no flag; write --name=value.\n"
            f"The flags are {', '.join(names)}."
        )


def _nearest_flag(name: str, values) -> str:
    from mha_haiku.core import checks

    first, _, field = name.partition(".")
    if field and "config" in values:  # a field; `config` is misspelt or left out
        field = field if checks.nearest(first, ["config"]) else name
        return f" Did you mean '--config.{field}'?"
    # Without the dashes, which would make any two short flags alike.
    return checks.nearest(first, list(values)).replace("'", "'--", 1)


def _help(values, description: str) -> str:
    shared = [name for name in values if name in shared_flags.DISTRIBUTED]
    if _IS_INSTALLED:
        description = description.replace("-m experiments.", "-m mha_haiku ")
    lines = [description.strip(), "", "Flags:"]
    lines += _entries(values, [name for name in values if name not in shared])
    if shared:
        lines += ["", "With several processes, as on a cluster:"]
        lines += _entries(values, shared)
    if "config" in values:
        lines.append("")
        if not values.config:
            lines.append(
                "Configs; with --config=<one of them>, --help shows its fields:"
            )
            for path in config_files.available():
                lines.append(f"  {path}: {config_files.title(path)}")
        else:
            lines.append(f"Fields of {values.config}, with their values there:")
            lines += [f"  {line}" for line in config_files.describe(values.config)]
    return "\n".join(lines)


def _entries(values, names) -> list[str]:
    """Returns the lines of `--help` about some flags."""
    lines = []
    for name in names:
        flag = values[name]
        entry = f"--{name}: {flag.help}"
        if flag.is_required:
            entry += " (required)"
        elif flag.default not in (None, False):
            entry += f" (default: {flag.default})"
        lines += textwrap.wrap(
            entry, 88, initial_indent="  ", subsequent_indent="      "
        )
    return lines


def _report(error: Exception) -> int:
    """Prints an error on stderr; returns the exit status."""
    from mha_haiku.core import checks

    # File names with bytes that are not UTF-8 have surrogates, which cannot be printed.
    text = str(error).encode("utf-8", "backslashreplace").decode()
    if isinstance(error, checks.ConfigError):
        first, *others = text.splitlines() or [""]
        print(f"error: {first}", file=sys.stderr)
        if others:
            print(" ".join(line.strip() for line in others), file=sys.stderr)
        return 2
    message = f"{type(error).__name__}: {' '.join(text.split())}"
    extra = _EXTRAS.get(error.name) if isinstance(error, ImportError) else None
    hint = "--debug shows the traceback"
    if extra:
        project = "'mha_haiku" if _IS_INSTALLED else "-e '."
        hint = f"pip install {project}[{extra}]' installs it"
    print(f"fault: {message} ({hint})", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Shows the warnings of mha_haiku as lines `warning: ...` while entered."""
    logger, handler = logging.getLogger("mha_haiku"), _WarningLines()
    logger.addHandler(handler)
    # Other packages install handlers at the root logger, which would print them again.
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _WarningLines(logging.Handler):
    """Writes a line per warning, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        import tqdm

        tqdm.tqdm.write(f"warning: {record.getMessage()}", file=sys.stderr)
