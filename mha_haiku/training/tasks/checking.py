"""Checks that a class is a task, and that its examples fit what the task declares."""

import dataclasses
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.training.tasks.base import Example, Task

_NEEDED = ("sequence_length", "num_tokens", "num_classes", "baseline")
_LONGEST = 300  # characters of an error of the user's code


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

    Example:
      >>> task = mh.tasks.make("reverse", sequence_length=4)
      >>> mh.tasks.check("my task", task).inputs.shape
      (4,)
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


def _faults_of_attributes(task) -> list[str]:
    faults = [
        f"{name} must be an integer above 0, not {described(getattr(task, name))}"
        for name in ("sequence_length", "num_classes")
        if not _is_count(getattr(task, name))
    ]
    sizes = task.num_tokens, task.feature_size
    known = [size for size in sizes if size is not None]
    if len(known) != 1 or not _is_count(known[0]):
        faults.append(
            "either num_tokens or feature_size must be an integer above 0 and the "
            f"other None, not {described(sizes[0])} and {described(sizes[1])}"
        )
    levels = task.baseline
    wanted = [x for x in ("accuracy", "loss") if x in task.metrics]
    has_levels = isinstance(levels, dict) and all(
        isinstance(levels.get(x), (int, float)) for x in wanted
    )
    if not has_levels:
        faults.append(
            f"baseline must have numbers for {' and '.join(wanted)}, not "
            f"{described(levels)}"
        )
    return faults


def _traced(name, task, is_own) -> Example:
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


def _faults_of_shapes(task, example) -> list[str]:
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


def _faults_of_values(task) -> list[str]:
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


def _is_count(value) -> bool | np.bool_:
    return isinstance(value, (int, np.integer)) and value >= 1 and value is not True


def described(value: Any) -> str:
    """Describes an array by dtype and shape, anything else as messages show it."""
    if hasattr(value, "dtype"):
        return f"{value.dtype} of shape {value.shape}"
    return checks.shown(value)
