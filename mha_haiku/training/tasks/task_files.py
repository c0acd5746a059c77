"""Tasks of users: their files and classes, and checks that a class is a task.

"mine.py:MyTask" names the class MyTask in the file mine.py. The file is executed. Its
path is relative to the working directory; `runs.folders.read_config` executes no file
that the caller does not trust.

"my_task" names the class MyTask in configs/tasks/my_task.py, next to the configs of the
project. The folder is found from the package, never from the working directory, and a
name without a path cannot leave it: a run can only name tasks that were installed with
the package. Such a file is code like the package's code, so runs need no permission to
execute it and store no sha256 of it.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sys
import types
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks.base import Example, Task, described

_NEEDED = ("sequence_length", "num_tokens", "num_classes", "baseline")
_LONGEST = 300  # characters of an error of the user's code

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
_registered: dict[tuple[str, str], type[Task]] = {}


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
        _registered["", task.__qualname__] = task
        return f":{task.__qualname__}"
    if path.resolve() == OF_PROJECT.get(path.stem):
        return path.stem
    if path.resolve().is_relative_to(pathlib.Path.cwd()):
        path = path.resolve().relative_to(pathlib.Path.cwd())
    _registered[str(path.resolve()), task.__qualname__] = task
    return f"{path}:{task.__qualname__}"


def executes(name: str) -> bool:
    """Checks whether `load` would execute a file that this process has not executed.

    Example:
      >>> import pathlib
      >>> _ = pathlib.Path("mine.py").write_text("print('This is executed.')")
      >>> mh.tasks.executes("mine.py:MyTask"), mh.tasks.executes("reverse")
      (True, False)
    """
    if (sha256 := digest(name)) is None:
        return False
    file, _, class_name = name.rpartition(":")
    key = str(pathlib.Path(file).resolve()), class_name
    return key not in _registered and (*key, sha256) not in _loaded


def load(name: str) -> type[Task]:
    """Loads the class of that name, which must be a task."""
    file, _, class_name = name.rpartition(":")
    source = _read(name) if file else b""
    path = str(pathlib.Path(file).resolve()) if file else ""
    if (path, class_name) in _registered:
        return _registered[path, class_name]
    if not file:
        raise checks.ConfigError(
            f"The task {class_name!r} was given in Python, and is not in a file.\n"
            "tasks.register(...) makes its class known."
        )
    key = path, class_name, hashlib.sha256(source).hexdigest()
    if key not in _loaded:
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


def check_class(name: str, task: Any) -> None:
    """Raises ConfigError unless a class is a frozen dataclass with a task's fields."""
    if not isinstance(task, type) or not issubclass(task, Task):
        raise checks.ConfigError(f"{name} must be a subclass of mha_haiku.tasks.Task.")
    if "__dataclass_fields__" not in vars(task) or not task.__dataclass_params__.frozen:
        raise checks.ConfigError(
            f"{name} must be a frozen dataclass, that is "
            "@dataclasses.dataclass(frozen=True, kw_only=True)."
        )
    names = {field.name for field in dataclasses.fields(task)}
    missing = sorted(task.__abstractmethods__)
    missing += [x for x in _NEEDED if x not in names and not hasattr(task, x)]
    if missing:
        raise checks.ConfigError(
            f"{name} must have {', '.join(missing)}; help(mha_haiku.tasks.Task) "
            "describes them."
        )


def check(name: str, task: Task, *, is_own: bool = True) -> Example:
    """Checks a task's attributes against an example, and returns its shapes.

    Errors of a task that `is_own` are reported as the user's mistakes, and the integers
    of some examples are checked, too. The ConfigError has all faults, and calls the
    task `name`.
    """
    faults = _faults_of_attributes(task)
    example = None
    if not faults:
        example = _traced(name, task, is_own)
        faults = _faults_of_shapes(task, example)
    if is_own and not faults:
        faults = _faults_of_values(task)
    if faults or example is None:
        raise checks.ConfigError(
            f"{name} does not fit together: {'; '.join(faults)}.\n"
            "help(mha_haiku.tasks.Task) describes them."
        )
    return example


def _read(name: str) -> bytes:
    file = name.rpartition(":")[0]
    try:
        return checks.whole_file(file)
    except (OSError, RuntimeError, ValueError) as error:  # a null byte in the name
        why = getattr(error, "strerror", None) or error
        raise checks.ConfigError(
            f"config.task.name: {file!r} cannot be read: {why}.\n"
            f"It is looked for from the working directory, {pathlib.Path.cwd()}."
        ) from error


def _run(file: str, source: bytes) -> Any:
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


def _checked(name: str, module: types.ModuleType, class_name: str) -> type[Task]:
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
    check_class(f"config.task.name: {name}", task)
    return task


def _faults_of_attributes(task: Task) -> list[str]:
    sizes = [x for x in (task.num_tokens, task.feature_size) if x is not None]
    levels, needed = task.baseline, {"accuracy", "loss"} & set(task.metrics)
    faults = [
        f"{name} must be an integer above 0, not {described(getattr(task, name))}"
        for name in ("sequence_length", "num_classes")
        if not _is_count(getattr(task, name))
    ]
    if len(sizes) != 1 or not _is_count(sizes[0]):
        faults.append(
            "either num_tokens or feature_size must be an integer above 0 and the "
            f"other None, not {described(task.num_tokens)} and "
            f"{described(task.feature_size)}"
        )
    numbers = levels if isinstance(levels, dict) else {}
    if not all(isinstance(numbers.get(x), (int, float)) for x in needed):
        names, got = " and ".join(sorted(needed)), described(levels)
        faults.append(f"baseline must have numbers for {names}, not {got}")
    return faults


def _traced(name: str, task: Task, is_own: bool) -> Example:
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        example = jax.eval_shape(task.example, key, task.train_data)
    except (Exception, SystemExit) as error:
        if not is_own:
            raise
        said = " ".join(str(error).split())[:_LONGEST]
        raise checks.ConfigError(
            f"example() of {name} raised {type(error).__name__}: {said}"
        ) from error
    if not isinstance(example, Example):
        raise checks.ConfigError(
            f"example() of {name} must return a tasks.Example, got {type(example)!r}."
        )
    return example


def _faults_of_shapes(task: Task, example: Example) -> list[str]:
    has_decoder = example.decoder_inputs is not None
    length = task.target_length if has_decoder else task.sequence_length
    shape = () if example.targets.ndim == 0 else (length,)
    features = () if task.num_tokens is not None else (task.feature_size,)
    inputs = (task.sequence_length, *features)
    shapes: tuple[Any, ...] = (inputs, shape, shape, (), shape, ())
    wanted = Example(*shapes)
    floats = {"weights", "inputs"} if features else {"weights"}
    faults = []
    for part, x in example._asdict().items():
        if x is None and part in Example._field_defaults:
            continue
        if part == "others":
            faults.append("others must be None: only a wrapped function reads them")
            continue
        kind, called = np.integer, "integers"
        if part in floats:
            kind, called = np.floating, "floats"
        size = getattr(wanted, part)
        if x is None or x.shape != size or not np.issubdtype(x.dtype, kind):
            faults.append(
                f"{part} must be {called} of shape {size}, got {described(x)}"
            )
    return faults


def _faults_of_values(task: Task) -> list[str]:
    keys = jax.random.split(jax.random.key(0), 8)
    examples = jax.vmap(lambda key: task.example(key, task.train_data))(keys)
    is_set = examples.targets.ndim == 1 and not task.labels_whole
    num_targets = task.sequence_length if is_set else task.num_classes
    limits = {
        "inputs": ("num_tokens", task.num_tokens),
        "targets": ("num_classes", num_targets),
        "decoder_inputs": ("num_classes", task.num_classes),
    }
    faults = []
    for part, (name, limit) in limits.items():
        x = getattr(examples, part)
        if x is None or limit is None:
            continue
        low, high = int(np.min(x)), int(np.max(x))
        if low < 0 or high >= limit:
            faults.append(
                f"{part} must be at least 0 and below {name}, {limit}, got {low} to "
                f"{high}"
            )
    return faults


def _is_count(value: object) -> bool | np.bool_:
    return isinstance(value, (int, np.integer)) and value >= 1 and value is not True
