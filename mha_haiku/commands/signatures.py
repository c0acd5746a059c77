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
_MOST_EXAMPLES = 2**20  # more would take too long
_ADDRESS = re.compile(r"(encoder|decoder|cross)(\.\d{1,9})?")  # of layers of a kind


class Overrides(tuple):
    """Pairs of a config's field, as `config.model.num_layers`, and its text."""


class Option(NamedTuple):
    """A flag."""

    name: str
    kind: Any  # a key of `_PARSERS`, or Overrides
    default: Any
    meaning: str
    group: str = ""  # title of the flags of `--help` that it is listed with


def options_of(asked: Callable) -> Callable[[Callable], Callable]:
    """Decorates a function to take another function's options as `**options`."""

    def decorate(function: Callable) -> Callable:
        function.options_of = asked
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
    found = []
    for parameter in _parameters(function):
        kind = _kind(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            names = {option.name for option in found}
            of = options(function.options_of)
            found += [option for option in of if option.name not in names]
        elif dataclasses.is_dataclass(kind):
            found += options(kind)
        elif kind in _PARSERS or kind is Overrides:
            group = getattr(function, "flags_title", "")
            name, meaning = parameter.name, meanings.get(parameter.name, "")
            found.append(Option(name, kind, parameter.default, meaning, group))
        elif parameter.default is REQUIRED:
            raise TypeError(f"{parameter} must be of a type that a flag has.")
    return found


def call(function: Any, given: Mapping[str, Any], enter: Callable) -> Any:
    """Calls a function, or makes a dataclass, with the values `given` by flag.

    `enter` is called with each dataclass, as it is made.
    """
    values = {}
    for parameter in _parameters(function):
        kind = _kind(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            names = [option.name for option in options(function.options_of)]
            values |= {name: given[name] for name in names if name not in values}
        elif dataclasses.is_dataclass(kind):
            values[parameter.name] = call(kind, given, enter)
        elif parameter.name in given:
            values[parameter.name] = given[parameter.name]
    result = function(**values)
    if dataclasses.is_dataclass(function):
        enter(result)
    return result


def parse(wanted: Sequence[Option], arguments: Sequence[str]) -> dict[str, Any]:
    """Parses a command line; returns the value of each flag.

    Raises:
      ConfigError: If there is no such flag, or a value is invalid.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    has_fields = any(option.kind is Overrides for option in wanted)
    words, fields = _split_fields(arguments) if has_fields else (arguments, ())
    for name, kind, default, meaning, _ in wanted:
        if kind is Overrides:
            continue
        default = None if default is REQUIRED else default
        if kind is bool:
            flags.DEFINE_boolean(name, default, meaning, flag_values=values)
            continue
        parser = _PARSERS[kind]
        if kind is int and name.endswith("examples"):
            parser = flags.IntegerParser(upper_bound=_MOST_EXAMPLES)
        flags.DEFINE(parser, name, default, meaning, flag_values=values)
    names = [f"--{name}" for name in values] + ["--config.<field>"] * has_fields
    listed = f"The flags are {', '.join(names)}."
    try:
        rest = values(["", *words])[1:]
    except flags.UnrecognizedFlagError as error:
        nearest = _nearest(error.flagname, values, has_fields)
        raise checks.ConfigError(
            f"There is no flag --{error.flagname}.{nearest}\n{listed}"
        ) from error
    except RecursionError as error:  # of absl, which compares long names with flags
        raise checks.ConfigError(
            f"There is no flag with so long a name.\n{listed}"
        ) from error
    except (flags.Error, ValueError) as error:
        raise checks.ConfigError(str(error)) from error
    if rest:
        raise checks.ConfigError(
            f"{rest[0]!r} belongs to no flag; write --name=value.\n{listed}"
        )
    for option in wanted:
        if option.default is REQUIRED and not values[option.name].value:
            raise checks.ConfigError(
                f"--{option.name}=... is missing.\n{option.meaning}"
            )
    return {
        option.name: Overrides(fields)
        if option.kind is Overrides
        else values[option.name].value
        for option in wanted
    }


def description(function: Callable) -> str:
    """Returns a docstring before its sections."""
    text = _docstring(function)
    return re.split(r"^(?:Args|Returns|Raises):$", text, flags=re.MULTILINE)[0].strip()


def help_lines(wanted: Sequence[Option]) -> list[str]:
    """Writes the lines of `--help` about flags."""
    lines = []
    for title in dict.fromkeys(option.group for option in wanted):
        lines += ["", f"{title or 'Flags'}:"]
        for name, kind, default, meaning, group in wanted:
            if group != title or kind is Overrides:
                continue
            entry = f"--{name}: {meaning}"
            if default is REQUIRED:
                entry += " (required)"
            elif default is not None and default is not False:
                is_list = isinstance(default, tuple | list)
                shown = ",".join(map(str, default)) if is_list else default
                entry += f" (default: {shown})"
            lines += textwrap.wrap(
                entry, 88, initial_indent="  ", subsequent_indent="      "
            )
    return lines


class _List(flags.ArgumentParser):
    """Reads words with commas between them as a list."""

    def __init__(self, one: Callable[[str], Any] = str, wanted: str = ""):
        super().__init__()
        self._one, self._wanted = one, wanted

    def parse(self, argument: str | Sequence) -> list:
        if not isinstance(argument, str):
            return list(argument)
        words = [word.strip() for word in argument.split(",")]
        if self._one is str:
            return words if argument else []
        try:
            found = [self._one(word) for word in words]
        except ValueError as error:
            raise ValueError(f"must be {self._wanted}") from error
        if any(isinstance(x, int) and abs(x) > _MOST for x in found):
            raise ValueError(f"must be integers of at most {_MOST}")
        return found


def _layer(word: str) -> int | str:
    return word if _ADDRESS.fullmatch(word) else int(word)


_PARSERS = {
    bool: flags.BooleanParser(),
    int: flags.IntegerParser(upper_bound=_MOST),
    float: flags.FloatParser(),
    str: flags.ArgumentParser(),
    Sequence[str]: _List(),
    Sequence[int]: _List(int, "integers, as 0,2"),
    Sequence[int | str]: _List(_layer, "integers or layers, as 0,2 or cross.0"),
}


def _parameters(function: Callable) -> list[inspect.Parameter]:
    """Lists the parameters with flags, `**options` before the last groups."""
    found = inspect.signature(function, eval_str=True).parameters.values()
    named = [x for x in found if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    if hasattr(function, "options_of"):
        groups = itertools.takewhile(
            lambda x: dataclasses.is_dataclass(_kind(x.annotation)), reversed(named)
        )
        others = next(x for x in found if x.kind is x.VAR_KEYWORD)
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
        return next((kind for kind in kinds if kind in _PARSERS), annotation)
    return annotation


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


def _nearest(name: str, values: Iterable[str], has_fields: bool) -> str:
    first, _, field = name.partition(".")
    if field and has_fields:  # a field; `config` is misspelled or left out
        field = field if checks.nearest(first, ["config"]) else name
        return f" Did you mean '--config.{field}'?"
    # Without the dashes, which would make any two short flags alike.
    return checks.nearest(first, list(values)).replace("'", "'--", 1)
