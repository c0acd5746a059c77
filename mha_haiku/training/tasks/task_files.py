"""Tasks of the user: "mine.py:MyTask" names the class MyTask in the file mine.py.

The file is executed. Its path is relative to the working directory.
"""

import hashlib
import importlib.util
import inspect
import pathlib
import sys
from typing import Any

from mha_haiku.core import checks
from mha_haiku.training.tasks import checking
from mha_haiku.training.tasks.base import Task

# Loaded classes by absolute path, class name and sha256 of the file; and classes that
# were registered in Python, by absolute path ("" without a file) and class name.
_loaded: dict[tuple[str, str, str], type[Task]] = {}
_given: dict[tuple[str, str], type[Task]] = {}


def is_name(name: Any) -> bool:
    """Checks whether a name means a task of the user."""
    return isinstance(name, str) and ":" in name


def register(task: type[Task]) -> str:
    """Registers a class in this process and returns its name.

    The name contains the file, from which other processes read the class. A class in no
    file, such as in a notebook, is named ":MyTask"; each process must register it.
    """
    try:
        file = inspect.getsourcefile(task)
    except (OSError, TypeError):
        file = None
    path = pathlib.Path(file) if file and "." not in task.__qualname__ else None
    if path is None or not path.is_file():
        _given["", task.__qualname__] = task
        return f":{task.__qualname__}"
    if path.resolve().is_relative_to(pathlib.Path.cwd()):
        path = path.resolve().relative_to(pathlib.Path.cwd())
    _given[str(path.resolve()), task.__qualname__] = task
    return f"{path}:{task.__qualname__}"


def load(name: str) -> type[Task]:
    """Loads the class of that name, which must be a task."""
    file, _, class_name = name.rpartition(":")
    if not file and ("", class_name) not in _given:
        raise checks.ConfigError(
            f"The task {class_name!r} was given in Python and is in no file.\n"
            "tasks.register(...) makes its class known."
        )
    source = _read(name) if file else b""
    path = str(pathlib.Path(file).resolve()) if file else ""
    if (path, class_name) in _given:
        return _given[path, class_name]
    key = path, class_name, hashlib.sha256(source).hexdigest()
    if key not in _loaded:
        _loaded[key] = _checked(name, _run(file, source), class_name)
    return _loaded[key]


def digest(name: str) -> str | None:
    """Computes the sha256 of the file of a user's task; None: it has no file."""
    if not is_name(name) or name.startswith(":"):
        return None
    return hashlib.sha256(_read(name)).hexdigest()


def _read(name) -> bytes:
    file = name.rpartition(":")[0]
    try:
        return checks.regular_file(file).read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # a null byte in the name
        why = getattr(error, "strerror", None) or error
        raise checks.ConfigError(
            f"config.task.name: {file!r} cannot be read: {why}.\n"
            f"It is looked for from the working directory, {pathlib.Path.cwd()}."
        ) from error


def _run(file, source) -> Any:
    module_name = f"task_file_{hashlib.sha256(source).hexdigest()}"
    spec = importlib.util.spec_from_loader(module_name, loader=None, origin=file)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    # dataclasses look annotations up in the module of that name.
    sys.modules[module_name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise checks.ConfigError(f"{file} is not Python{line}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        raise checks.ConfigError(raised(file, error)) from error
    return module


def raised(what: str, error: BaseException) -> str:
    """Formats the message, on one line, for an error that the user's code raised."""
    return " ".join(f"{what} raised {type(error).__name__}: {error}".split())


def _checked(name, module, class_name) -> type[Task]:
    own = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    task = vars(module).get(class_name)
    if task is None:
        listed = f"it has {', '.join(own)}" if own else "it has none"
        raise checks.ConfigError(
            f"config.task.name: {name.rpartition(':')[0]} has no class {class_name!r}; "
            f"{listed}.{checks.nearest(class_name, own)}"
        )
    checking.check_class(f"config.task.name: {name}", task)
    return task
