"""Flags from the signature and the docstring of a function.

A parameter gives the flag of its name: its type and default are the annotation's and
the signature's, its help is the parameter's entry under `Args:`. A parameter whose
annotation is a dataclass gives a flag per field, so that commands share them.
`**options` give the options of `options_of(...)`, so that a command that calls a verb
has the verb's.

absl parses the flags. It lacks a way from a signature to flags, lists of numbers,
fields of a config (`--config.model.num_layers=3`), and an error that names the known
flags.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from mha_haiku.core import checks

REQUIRED = inspect.Parameter.empty
_MOST = 2**31 - 1  # the largest integer of any flag
_ADDRESS = re.compile(r"(encoder|decoder|cross)(\.\d{1,9})?")  # of layers of a kind


class Overrides(tuple):
    """Pairs of a config's field, as `config.model.num_layers`, and its text."""


class Option(NamedTuple):
    """A flag."""

    name: str
    kind: Any  # a key of `_READERS`, or Overrides
    default: Any
    meaning: str


def options_of(other: Callable) -> Callable[[Callable], Callable]:
    """Decorates a function to take another function's options as `**options`."""

    def decorate(function: Callable) -> Callable:
        function.options_of = other
        return function

    return decorate


def options(function: Any) -> list[Option]:
    """Lists the flags of a function, or of a dataclass.

    A parameter of a type that no flag has is left out, unless it is required.

    Raises:
      TypeError: If no flag has the type of a required parameter.
    """
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", _docstring(function), re.M)
    entries = re.findall(
        r"^  (\w+): (.*(?:\n(?:   .*)?)*)", section[1] if section else "", re.M
    )
    meanings = {name: " ".join(text.split()) for name, text in entries}
    result = []
    for parameter in _parameters(function):
        kind = _kind(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            names = {option.name for option in result}
            of = options(function.options_of)
            result += [option for option in of if option.name not in names]
        elif dataclasses.is_dataclass(kind):
            result += options(kind)
        elif kind in _READERS or kind is Overrides:
            name, meaning = parameter.name, meanings.get(parameter.name, "")
            result.append(Option(name, kind, parameter.default, meaning))
        elif parameter.default is REQUIRED:
            raise TypeError(f"{parameter} must be of a type that a flag has.")
    return result


def call(function: Any, by_flag: Mapping[str, Any], enter: Callable) -> Any:
    """Calls a function, or makes a dataclass, with the values `by_flag` by flag.

    `enter` is called with each dataclass, as it is made.
    """
    values = {}
    for parameter in _parameters(function):
        kind = _kind(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            names = [option.name for option in options(function.options_of)]
            values |= {name: by_flag[name] for name in names if name not in values}
        elif dataclasses.is_dataclass(kind):
            values[parameter.name] = call(kind, by_flag, enter)
        elif parameter.name in by_flag:
            values[parameter.name] = by_flag[parameter.name]
    result = function(**values)
    if dataclasses.is_dataclass(function):
        enter(result)
    return result


def parse(declared: Sequence[Option], arguments: Sequence[str]) -> dict[str, Any]:
    """Parses a command line; returns the value of each flag.

    Raises:
      ConfigError: If there is no such flag, or a value is invalid.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    has_fields = any(option.kind is Overrides for option in declared)
    words, fields = _split_fields(arguments) if has_fields else (arguments, [])
    for name, kind, default, meaning in declared:
        default = None if default is REQUIRED else default
        if kind is bool:
            flags.DEFINE_boolean(name, default, meaning, flag_values=values)
        elif kind is not Overrides:
            flags.DEFINE(_Parser(kind), name, default, meaning, flag_values=values)
    names = [f"--{name}" for name in values] + ["--config.<field>"] * has_fields
    listed = f"The flags are {', '.join(names)}."
    try:
        rest = values(["", *words])[1:]
    except flags.UnrecognizedFlagError as error:
        nearest = _nearest(error.flagname, values, has_fields)
        raise checks.ConfigError(
            f"There is no flag --{error.flagname}.{nearest}\n{listed}"
        ) from error
    except (flags.Error, ValueError) as error:
        raise checks.ConfigError(_told(str(error))) from error
    if rest:
        raise checks.ConfigError(
            f"{rest[0]!r} belongs to no flag; write --name=value.\n{listed}"
        )
    result = {}
    for name, kind, default, meaning in declared:
        result[name] = Overrides(fields) if kind is Overrides else values[name].value
        if default is REQUIRED and not result[name]:
            raise checks.ConfigError(f"--{name}=... is missing.\n{meaning}")
    return result


def _told(message: str) -> str:
    """Writes absl's message about a value like the other messages."""
    message = message.removeprefix("flag ").replace(": must be", " must be", 1)
    message = re.sub(r": \('Non-boolean.*", " must be true or false", message)
    return message.removesuffix(".") + "."


def description(function: Callable) -> str:
    """Returns a docstring before its sections."""
    text = _docstring(function)
    return re.split(r"^(?:Args|Returns|Raises):$", text, flags=re.MULTILINE)[0].strip()


def help_lines(declared: Sequence[Option]) -> list[str]:
    """Writes the lines of `--help` about flags."""
    lines = ["", "Flags:"]
    for name, kind, default, meaning in declared:
        if kind is Overrides:
            continue
        entry = f"--{name}: {meaning}"
        if default is REQUIRED:
            entry += " (required)"
        elif default is not None and default is not False:
            is_list = isinstance(default, tuple | list)
            text = ",".join(map(str, default)) if is_list else default
            entry += f" (default: {text})"
        lines += textwrap.wrap(
            entry, 88, initial_indent="  ", subsequent_indent="      "
        )
    return lines


def _integer(text: str) -> int:
    if abs(number := int(text)) > _MOST:
        raise ValueError
    return number


def _layer(word: str) -> int | str:
    return word if _ADDRESS.fullmatch(word) else _integer(word)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], list]:
    return lambda text: [read(word.strip()) for word in text.split(",") if text]


_READERS: dict[Any, Callable[[str], Any]] = {
    bool: str,  # absl has flags of its own for these
    int: _integer,
    float: float,
    str: str,
    Sequence[str]: _list_of(str),
    Sequence[int]: _list_of(_integer),
    Sequence[int | str]: _list_of(_layer),
}
_WANTED = {
    int: f"an integer of at most {_MOST}",
    float: "a number",
    Sequence[int]: f"integers of at most {_MOST}, as 0,2",
    Sequence[int | str]: "integers or layers, as 0,2 or cross.0",
}


class _Parser(flags.ArgumentParser):
    """Reads the value of a flag of a kind."""

    def __init__(self, kind: Any):
        super().__init__()
        self._kind = kind

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument
        try:
            return _READERS[self._kind](argument)
        except ValueError:
            raise ValueError(f"must be {_WANTED[self._kind]}") from None


def _split_fields(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns words without `--config.x.y=value`, and those as pairs (name, value)."""
    others, fields = [], []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith(("--config.", "-config.")):
            others.append(word)
            continue
        name, equals, text = word.lstrip("-").partition("=")
        if not equals:  # `--config.x value`, or only `--config.x`, which is true.
            has_value = words and not words[0].startswith("--")
            text = words.pop(0) if has_value else "true"
        fields.append((name, text))
    return others, fields


def _parameters(function: Callable) -> list[inspect.Parameter]:
    """Lists the parameters with flags, `**options` before the last groups."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    named = [x for x in parameters if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    if hasattr(function, "options_of"):
        groups = itertools.takewhile(
            lambda x: dataclasses.is_dataclass(_kind(x.annotation)), reversed(named)
        )
        others = next(x for x in parameters if x.kind is x.VAR_KEYWORD)
        named.insert(len(named) - len(list(groups)), others)
    return named


def _docstring(function: Callable) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return inspect.getdoc(function) or ""


def _kind(annotation: Any) -> Any:
    """Returns the annotation, or the first type of a union that a flag supports."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = typing.get_args(annotation)
        if Sequence[str] in kinds:  # of which one text is an item
            return Sequence[str]
        return next((kind for kind in kinds if kind in _READERS), annotation)
    return annotation


def _nearest(name: str, values: Iterable[str], has_fields: bool) -> str:
    first, _, field = name.partition(".")
    if field and has_fields:  # a field; `config` is misspelled or left out
        field = field if checks.nearest(first, ["config"]) else name
        return f" Did you mean '--config.{field}'?"
    # Without the dashes, which would make any two short flags alike.
    return checks.nearest(first, list(values)).replace("'", "'--", 1)
