"""Config files: list, load, override from the command line, and describe them.

A config file is executed. Its function `get_config()` starts from
`runs.default_config()` and replaces fields.

`override` sets a field from text, by the annotation of the field.
"""

import ast
import dataclasses
import difflib
import keyword
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from mha_haiku.core import checks, fields
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.fields import Field, Section
from mha_haiku.training.runs import RunConfig, configuration

# The project's configs: a link in a checkout, files in the wheel.
_FILES = pathlib.Path(__file__).with_name("files")

_WANTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    tuple: "a list such as [1, 2]",
}


def available() -> list[str]:
    """Returns the project's config files, as `configs/<name>.py`."""
    files = sorted((_FILES / "configs").glob("*.py"))
    return [f"configs/{file.name}" for file in files if file.stem != "__init__"]


def title(path: str) -> str:
    """Returns the first line of a config file's docstring, without executing it."""
    try:
        docstring = ast.get_docstring(ast.parse(_source(path)))
    except SyntaxError:
        docstring = None
    return (docstring or "").partition("\n")[0]


def load(path: str) -> RunConfig:
    """Returns the config that the `get_config()` of a file returns.

    The path is relative to the working directory or to the project's folder.

    Raises:
      ConfigError: If there is no such file, or it does not return a config.
    """
    module: dict[str, Any] = {"__name__": "config_file", "__file__": path}
    source = _source(path)
    try:
        exec(compile(source, path, "exec"), module)
        config = module["get_config"]() if "get_config" in module else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        hint = ""
        if isinstance(error, dataclasses.FrozenInstanceError):
            hint = (
                "\nA config is frozen: return config.replace(training=dict(steps=1))."
            )
        what = f"{path} raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(what + hint) from error
    if "get_config" not in module:
        raise ConfigError(f"{path} has no get_config(); {available()[0]} shows one.")
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"get_config() of {path} must return a mha_haiku.runs.RunConfig, got "
            f"{type(config).__name__}."
        )
    return config


def override(config: RunConfig, overrides: Iterable[tuple[str, str]]) -> RunConfig:
    """Returns a config with fields set from text.

    `overrides` are pairs of a field's dotted name, such as `config.model.num_layers`,
    and the text to parse by its annotation. If the task changes, options that both
    tasks have keep their values, and the others get their defaults.

    Raises:
      ConfigError: If there is no such field, or the value is invalid.
    """
    texts, whole = dict(overrides), config
    task = texts.get("config.task.name", config.task.name)
    if task is not None and task != config.task.name:
        whole = configuration.default_config(task)
    changes = {}
    for name, text in texts.items():
        declared = _declared(whole, name)
        if declared is None:
            raise _unknown_field(whole, name, text)
        changes[name.removeprefix("config.")] = _parsed(name, text, declared)
    return config.replace(**fields.nested(changes))


def _declared(config: Section, name: str) -> Field | None:
    """Finds the declaration of a field by its dotted name."""
    section: Any = config
    *path, last = name.split(".")[1:] or [""]
    for part in path:
        section = getattr(section, part, None)
    is_section = isinstance(section, Section)
    return fields.declared(type(section)).get(last) if is_section else None


def describe(path: str) -> list[str]:
    """Returns a line for each field of a config file: its flag, value and meaning."""
    entries = []
    for name, declared, value in fields.flat(load(path)):
        meaning = declared.explained
        if value is None:
            kinds = " or ".join(kind.__name__ for kind in declared.kinds)
            meaning = f"({kinds.replace('tuple', 'list')}) {meaning}"
        entries.append((f"--{name}={value}", meaning))
    width = max((len(flag) for flag, _ in entries), default=0)
    return [f"{flag:{width}}  {meaning}".rstrip() for flag, meaning in entries]


def _parsed(name: str, text: str, declared: Field) -> Any:
    """Returns the value that a text encodes."""
    kinds = declared.kinds
    # "none" may also be a choice, as of config.model.embedding.positions.
    if text.lower() == "none" and declared.may_be_none:
        return None
    try:
        return _parse(text, kinds)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        literal = _WANTED.get(kinds[0], "") if len(kinds) == 1 else ""
        raise ConfigError(
            f"{name} must be {literal or 'a Python literal'}, as its default "
            f"{declared.default!r} is; got {text!r}."
        ) from error


def _source(path: str) -> str:
    for folder in (pathlib.Path(), _FILES):
        if os.path.isfile(folder / path):
            return checks.text_of(folder / path, path)
    stems = [pathlib.Path(name).stem for name in available()]
    near = difflib.get_close_matches(pathlib.Path(path).stem, stems, n=1)
    nearest = f" Did you mean 'configs/{near[0]}.py'?" if near else ""
    raise ConfigError(
        f"--config: there is no file {path!r}.{nearest}\n"
        f"Files in configs/: {', '.join(stems)}."
    )


def _parse(text: str, kinds: tuple[type, ...]) -> Any:
    if kinds == (str,):
        return text
    if kinds == (bool,):
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kinds in ((int,), (float,)):
        return kinds[0](text)
    if not set(kinds) <= {int, float, tuple}:
        if text.isidentifier() and not keyword.iskeyword(text):
            return text  # of fields that take several kinds, as attention.sinks
        return ast.literal_eval(text)
    value = ast.literal_eval(text)
    value = tuple(value) if isinstance(value, list) else value
    if not isinstance(value, kinds):
        raise TypeError(f"{text} is of another type")
    return value


def _unknown_field(config: RunConfig, name: str, text: str) -> Exception:
    section, section_name = config, "config"
    for key in name.split(".")[1:]:
        if not isinstance(getattr(section, key, None), Section):
            break
        section, section_name = getattr(section, key), f"{section_name}.{key}"
    listed = f"{section_name} has the fields {', '.join(vars(section))}."
    if section_name == name:
        return ConfigError(f"--{name}={text} sets no field.\n{listed}")
    near = fields.nearest(name, [path for path, *_ in fields.flat(config)])
    return ConfigError(f"--{name}: there is no such field.{near}\n{listed}")
