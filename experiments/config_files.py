"""Config files: list, load, override from the command line, and describe them.

A config file is executed. It has a function `get_config()` that starts from
`runs.default_config()` and sets what differs.

`ml_collections.config_flags` is not used: it answers a misspelt field with three
tracebacks, and its `--help` lists no fields. `override` does the part that is needed:
it sets a field from text, by the type of the field's default.
"""

import ast
import keyword
import os
import pathlib
import tokenize
from collections.abc import Iterable, Iterator
from typing import Any

from ml_collections import config_dict

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

_WANTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list such as [1, 2]",
    tuple: "a tuple such as (1, 2)",
}


def available() -> list[str]:
    """Returns the project's config files, as `configs/<name>.py`."""
    files = sorted((_REPOSITORY / "configs").glob("*.py"))
    return [f"configs/{file.name}" for file in files if file.stem != "__init__"]


def title(path: str) -> str:
    """Returns the first line of a config file's docstring, without executing it."""
    try:
        docstring = ast.get_docstring(ast.parse(_source(path)))
    except SyntaxError:
        docstring = None
    return (docstring or "").partition("\n")[0]


def load(path: str) -> config_dict.ConfigDict:
    """Returns the config that the file's `get_config()` returns.

    Args:
      path: The file, relative to the working directory or to the project's folder.

    Raises:
      ConfigError: If there is no such file, or it does not return a config.
    """
    source = _source(path)
    try:
        code = compile(source, path, "exec")
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise _mistake(f"{path} is not Python{line}: {error.msg}.") from error
    except ValueError as error:  # a null byte
        raise _mistake(f"{path} is not Python: {error}.") from error
    module = {"__name__": "config_file", "__file__": path}
    try:
        exec(code, module)
        config = module["get_config"]() if "get_config" in module else None
    except Exception as error:
        raise _mistake(f"{path} raised {type(error).__name__}: {error}") from error
    if "get_config" not in module:
        raise _mistake(f"{path} has no get_config(); {available()[0]} shows one.")
    if not isinstance(config, config_dict.ConfigDict):
        raise _mistake(
            f"get_config() of {path} must return a ml_collections.ConfigDict, "
            f"got {type(config).__name__}."
        )
    return config


def of_run(workdir: str) -> config_dict.ConfigDict | None:
    """Returns the config of the run in a folder; None if there is none.

    Raises:
      ConfigError: If its config.json cannot be used.
    """
    from mha_haiku.core import checks
    from mha_haiku.training.runs import configuration, folders

    folder = folders.Folder(checks.as_path(workdir))
    values = folders.read_config(folder)
    return None if values is None else configuration.of_json(values)


def override(config: config_dict.ConfigDict, overrides: Iterable[tuple[str, str]]):
    """Sets fields of `config` from text.

    If the task changes, options that both tasks have keep their values, and the others
    get their defaults.

    Args:
      config: Changed in place.
      overrides: Pairs of a field's dotted name, such as `config.model.num_layers`, and
        the text to parse by the type of its default.

    Raises:
      ConfigError: If there is no such field, or the text is not of its type.
    """
    from mha_haiku.training.runs import configuration

    overrides = list(overrides)
    for name, text in overrides:
        if name == "config.task.name":
            configuration.set_task(config, text)
    places = {name: (section, key) for name, section, key in _fields(config)}
    for name, text in overrides:
        if name not in places:
            raise _unknown_field(config, places, name, text)
        _set(*places[name], name, text)


def describe(path: str) -> list[str]:
    """Returns a line for each field of a config file: its flag, value and meaning."""
    from mha_haiku.core import fields
    from mha_haiku.training.runs import configuration

    config = load(path)
    task = configuration.task_name(config.to_dict())
    declared = dict(fields.flat("config", configuration.declared(task)))
    order = {name: place for place, name in enumerate(declared)}
    shown = sorted(_fields(config), key=lambda field: order.get(field[0], len(order)))
    entries = []
    for name, section, key in shown:
        value = section[key]
        meaning = declared[name].explained if name in declared else ""
        if value is None:
            meaning = f"({section.get_type(key).__name__}) {meaning}"
        entries.append((f"--{name}={value}", meaning))
    width = max((len(flag) for flag, _ in entries), default=0)
    return [f"{flag:{width}}  {meaning}".rstrip() for flag, meaning in entries]


def _set(section, key, name, text) -> None:
    kind = section.get_type(key)
    # "none" may also be a choice, as of config.model.embedding.positions.
    is_none = text.lower() == "none" and (kind is not str or section[key] is None)
    try:
        section[key] = None if is_none else _parse(text, kind)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        wanted = _WANTED.get(kind, "a Python literal")
        raise _mistake(
            f"{name} must be {wanted}, as its default {section[key]!r} is; "
            f"got {text!r}."
        ) from error


def _source(path: str) -> str:
    for folder in (pathlib.Path(), _REPOSITORY):
        if os.path.isfile(folder / path):
            try:
                with tokenize.open(folder / path) as file:
                    return file.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                raise _mistake(f"{path} is not Python: it is not text.") from error
            except OSError as error:
                raise _mistake(f"{path} cannot be read: {error.strerror}.") from error
    from mha_haiku.core import checks

    nearest = checks.nearest(f"configs/{pathlib.Path(path).stem}.py", available())
    raise checks.ConfigError(
        f"--config: there is no file {path!r}.{nearest}\n"
        f"The project's are {', '.join(available())}."
    )


def _fields(section, prefix: str = "config") -> Iterator[tuple[str, Any, str]]:
    """Yields each field's dotted name, the section that holds it, and its key there."""
    for key in section:
        name = f"{prefix}.{key}"
        if isinstance(section[key], config_dict.ConfigDict):
            yield from _fields(section[key], name)
        else:
            yield name, section, key


def _parse(text: str, kind: type) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind in (int, float):
        return kind(text)
    if kind is object and text.isidentifier() and not keyword.iskeyword(text):
        return text  # of fields that take several kinds, as attention.sinks
    value = ast.literal_eval(text)
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if kind is not type(None) and not isinstance(value, kind):
        raise TypeError(f"{text} is not a {kind.__name__}")
    return value


def _unknown_field(config, fields, name: str, text: str) -> Exception:
    from mha_haiku.core import checks
    from mha_haiku.core.fields import nearest

    section, section_name = config, "config"
    for key in name.split(".")[1:]:
        if not isinstance(section.get(key), config_dict.ConfigDict):
            break
        section, section_name = section[key], f"{section_name}.{key}"
    listed = f"{section_name} has the fields {', '.join(section)}."
    if section_name == name:
        return checks.ConfigError(f"--{name}={text} sets no field.\n{listed}")
    return checks.ConfigError(
        f"--{name}: there is no such field.{nearest(name, fields)}\n{listed}"
    )


def _mistake(message: str) -> Exception:
    # mha_haiku is imported only here: that takes as long as all of --help.
    from mha_haiku.core import checks

    return checks.ConfigError(message)
