"""Tasks in files: users' tasks by file and class, the project's tasks by name.

"mine.py:MyTask" names the class MyTask in the file mine.py. The file is executed. Its
path is relative to the working directory. Naming it in Python or on a command line
permits that; a name in the file of a run does not, see `named_by_a_file`.

"my_task" names the class MyTask in configs/tasks/my_task.py, next to the configs of the
project. The folder is found from the package, never from the working directory, and a
name without a path cannot leave it: a run can only name tasks that were installed with
the package. Such a file is code like the package's code, so runs need no permission to
execute it and store no sha256 of it.
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from mha_haiku.core import checks
from mha_haiku.training.tasks import checking
from mha_haiku.training.tasks.base import Task

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
# In a checkout a link to configs; resolved, as paths of tasks are compared.
_CONFIGS = (_PACKAGE / "commands/files/configs").resolve()
OF_PROJECT = {
    path.stem: path
    for path in sorted(_CONFIGS.glob("tasks/*.py"))
    if path.stem != "__init__"
}
"""The files of the project's tasks, by the names of the tasks."""

# Loaded classes by absolute path, class name and sha256 of the file; and classes that
# were registered in Python, by absolute path ("" without a file) and class name.
_loaded: dict[tuple[str, str, str], type[Task]] = {}
_given: dict[tuple[str, str], type[Task]] = {}
# Whether files that runs name may be executed; and whether a run names them now.
_trusts_runs = contextvars.ContextVar("trusts_runs", default=False)
_is_of_run = contextvars.ContextVar("is_of_run", default=False)


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
    if path.resolve() == OF_PROJECT.get(path.stem):
        return path.stem
    if path.resolve().is_relative_to(pathlib.Path.cwd()):
        path = path.resolve().relative_to(pathlib.Path.cwd())
    _given[str(path.resolve()), task.__qualname__] = task
    return f"{path}:{task.__qualname__}"


def trusting_runs(trust_code: bool) -> contextlib.AbstractContextManager[None]:
    """Allows to execute the files of tasks that runs name, while entered.

    Example:
      >>> import pathlib
      >>> code = "from mha_haiku.training.tasks.uniform_tasks import Parity"
      >>> _ = pathlib.Path("mine.py").write_text(code)
      >>> with mh.tasks.trusting_runs(True), mh.tasks.named_by_a_file():
      ...     mh.tasks.of_name("mine.py:Parity").__name__
      'Parity'
    """
    return _set(_trusts_runs, trust_code or _trusts_runs.get())


def named_by_a_file() -> contextlib.AbstractContextManager[None]:
    """Forbids to execute files while entered, unless the caller trusts runs.

    Classes of files that this process has executed already can be loaded.

    Example:
      >>> import pathlib
      >>> _ = pathlib.Path("mine.py").write_text("print('This is executed.')")
      >>> with mh.tasks.named_by_a_file():
      ...     mh.tasks.of_name("mine.py:MyTask")
      Traceback (most recent call last):
        ...
      mha_haiku.core.checks.ConfigError: config.task.name 'mine.py:MyTask' would ...
    """
    return _set(_is_of_run, True)


@contextlib.contextmanager
def _set(variable, value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def load(name: str) -> type[Task]:
    """Loads the class of that name, which must be a task."""
    file, _, class_name = name.rpartition(":")
    if not file and ("", class_name) not in _given:
        raise checks.ConfigError(
            f"The task {class_name!r} was given in Python, and is not in a file.\n"
            "tasks.register(...) makes its class known."
        )
    source = _read(name) if file else b""
    path = str(pathlib.Path(file).resolve()) if file else ""
    if (path, class_name) in _given:
        return _given[path, class_name]
    key = path, class_name, hashlib.sha256(source).hexdigest()
    if key not in _loaded:
        if _is_of_run.get() and not _trusts_runs.get():
            raise checks.ConfigError(
                f"config.task.name {name!r} would execute the file {file!r}.\n"
                "Where you trust it, allow that by mha_haiku.load(..., "
                "trust_code=True), or by --trust_code."
            )
        _loaded[key] = _checked(name, _run(file, source), class_name)
    return _loaded[key]


@functools.cache
def of_project(name: str) -> type[Task]:
    """Loads the project's task of that name, a key of `OF_PROJECT`."""
    file, class_name = str(OF_PROJECT[name]), name.title().replace("_", "")
    whole_name = f"{file}:{class_name}"
    return _checked(whole_name, _run(file, _read(whole_name)), class_name)


def digest(name: str) -> str | None:
    """Computes the sha256 of the file of a user's task, or None if it has no file.

    Example:
      >>> import pathlib
      >>> _ = pathlib.Path("mine.py").write_text("class MyTask: ...")
      >>> mh.tasks.digest("mine.py:MyTask")[:12]
      '68dbedfef4ac'
    """
    if not is_name(name) or name.startswith(":"):
        return None
    return hashlib.sha256(_read(name)).hexdigest()


def _read(name) -> bytes:
    file = name.rpartition(":")[0]
    try:
        return checks.whole_file(file)
    except (OSError, RuntimeError, ValueError) as error:  # a null byte in the name
        why = getattr(error, "strerror", None) or error
        raise checks.ConfigError(
            f"config.task.name: {file!r} cannot be read: {why}.\n"
            f"It is looked for from the working directory, {pathlib.Path.cwd()}."
        ) from error


def _run(file, source) -> Any:
    module_name = f"task_file_{hashlib.sha256(source).hexdigest()}"
    spec = importlib.util.spec_from_loader(module_name, loader=None, origin=file)
    assert spec is not None  # as there is no loader that could lack the module
    module = importlib.util.module_from_spec(spec)
    module.__file__ = file
    # dataclasses look annotations up in the module of that name.
    sys.modules[module_name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise checks.ConfigError(f"{file} is not Python{line}: {error.msg}.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
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
