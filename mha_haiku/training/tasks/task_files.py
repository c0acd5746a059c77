"""Tasks of users: their files and classes, and checks that a class is a task.

"mine.py:MyTask" names the class MyTask in the file mine.py. The file is executed. Its
path is relative to the working directory; `runs.folders.read_config` executes no file
that the caller does not trust.

"my_task" names the class MyTask in configs/tasks/my_task.py. The folder is found from
the package, and a name without a path cannot leave it: such a file is code like the
package's code, so runs need no permission to execute it and store no sha256 of it.
"""

import dataclasses
import functools
import hashlib
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
    """Checks whether `load` would execute a file that this process has not executed."""
    sha256 = digest(name)
    key = _key(name)
    return sha256 is not None and not (key in _registered or (*key, sha256) in _loaded)


def load(name: str) -> type[Task]:
    """Loads the class of that name, which must be a task."""
    source = b"" if name.startswith(":") else _read(name)
    key = _key(name)
    if key in _registered:
        return _registered[key]
    if name.startswith(":"):
        raise checks.ConfigError(
            f"The task {name[1:]!r} was given in Python, and is not in a file.\n"
            "tasks.register(...) makes its class known."
        )
    key = *key, hashlib.sha256(source).hexdigest()
    if key not in _loaded:
        _loaded[key] = _executed(name, source)
    return _loaded[key]


def _key(name: str) -> tuple[str, str]:
    file, _, class_name = name.rpartition(":")
    return str(pathlib.Path(file).resolve()) if file else "", class_name


@functools.cache
def of_project(name: str) -> type[Task]:
    """Loads the project's task of that name, a key of `OF_PROJECT`."""
    whole_name = f"{OF_PROJECT[name]}:{name.title().replace('_', '')}"
    return _executed(whole_name, _read(whole_name))


def digest(name: str) -> str | None:
    """Computes the sha256 of the file of a user's task, or None if it has no file."""
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
    """Checks that examples have the sizes that a task declares; returns their shapes.

    Errors of a task that `is_own` are reported as the user's mistakes, and the integers
    of some examples are checked, too. The ConfigError has all faults, and calls the
    task `name`.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        example = jax.eval_shape(task.example, key, task.train_data)
    except (Exception, SystemExit) as error:
        if not is_own:
            raise
        raise checks.ConfigError(raised(f"example() of {name}", error)) from error
    if not isinstance(example, Example):
        raise checks.ConfigError(
            f"example() of {name} must return a tasks.Example, got {type(example)!r}."
        )
    faults = _faults_of_shapes(task, example)
    if not {"accuracy", "loss"} <= set(task.baseline or ()):
        faults.append(f"baseline must have accuracy and loss, got {task.baseline}")
    if is_own and not faults:
        faults = _faults_of_values(task)
    if faults:
        raise checks.ConfigError(
            f"{name} does not fit together: {'; '.join(faults)}.\n"
            "help(mha_haiku.tasks.Task) describes them."
        )
    return example


def raised(what: str, error: BaseException) -> str:
    """Formats the message, on one line, for an error that the user's code raised."""
    text = " ".join(f"{what} raised {type(error).__name__}: {error}".split())
    return text[:_LONGEST]


def _faults_of_shapes(task: Task, example: Example) -> list[str]:
    length = task.sequence_length
    size = () if task.num_tokens is not None else (task.feature_size,)
    has_decoder = example.decoder_inputs is not None
    of_targets = (task.target_length if has_decoder else length,)
    of_targets = of_targets if example.targets.ndim else ()
    inputs = (length, *size), np.floating if size else np.integer
    integers, lengths = (of_targets, np.integer), ((), np.integer)
    weights = of_targets, np.floating
    expected = inputs, integers, weights, lengths, integers, lengths
    faults = []
    for part, (shape, kind) in zip(Example._fields, expected, strict=False):
        x = getattr(example, part)
        if x is None and part in Example._field_defaults:
            continue
        if x is None or x.shape != shape or not np.issubdtype(x.dtype, kind):
            what = "floats" if kind is np.floating else "integers"
            faults.append(f"{part} must be {what} {shape}, got {described(x)}")
    return faults


def _faults_of_values(task: Task) -> list[str]:
    keys = jax.random.split(jax.random.key(0), 8)
    examples = jax.vmap(lambda key: task.example(key, task.train_data))(keys)
    is_set = examples.targets.ndim == 1 and not task.labels_whole
    num_targets = task.sequence_length if is_set else task.num_classes
    limits = (
        ("inputs", "num_tokens", task.num_tokens),
        ("targets", "num_classes", num_targets),
        ("decoder_inputs", "num_classes", task.num_classes),
    )
    faults = []
    for part, name, limit in limits:
        x = getattr(examples, part)
        if x is not None and limit is not None and (x.min() < 0 or x.max() >= limit):
            faults.append(
                f"{part} must be at least 0 and below {name}, {limit}, got {x.min()} "
                f"to {x.max()}"
            )
    return faults


def _read(name: str) -> bytes:
    file = name.rpartition(":")[0]
    try:
        return pathlib.Path(file).read_bytes()
    except OSError as error:
        raise checks.ConfigError(
            f"config.task.name: {file!r} cannot be read: {error.strerror}.\n"
            f"It is looked for from the working directory, {pathlib.Path.cwd()}."
        ) from error


def _executed(name: str, source: bytes) -> type[Task]:
    """Executes the source of a file and returns the class that the name names."""
    file, _, class_name = name.rpartition(":")
    module_name = f"task_file_{hashlib.sha256(source).hexdigest()}"
    module = types.ModuleType(module_name)
    module.__file__ = file
    # dataclasses look annotations up in the module of that name.
    sys.modules[module_name] = module
    try:
        exec(compile(source, file, "exec"), vars(module))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        raise checks.ConfigError(raised(file, error)) from error
    names = [key for key, value in vars(module).items() if isinstance(value, type)]
    if class_name not in vars(module):
        raise checks.ConfigError(
            f"config.task.name: {file} has no class {class_name!r}."
            f"{checks.nearest(class_name, names)}"
        )
    task = vars(module)[class_name]
    check_class(f"config.task.name: {name}", task)
    return task
