"""Tasks: one per file, made by name."""

import dataclasses
from typing import Any

from mha_haiku import checks
from mha_haiku.tasks import (
    associative_recall,
    copy,
    digits_anomaly,
    histogram,
    induction,
    language_model,
    masked_language_model,
    modular_addition,
    parity,
    reverse,
    sort,
)
from mha_haiku.tasks.base import Example, Task, batch

__all__ = ["Example", "Task", "batch", "make", "names"]

_TASKS = {
    task.name: task
    for task in (
        reverse.Reverse,
        copy.Copy,
        sort.Sort,
        histogram.Histogram,
        associative_recall.AssociativeRecall,
        induction.Induction,
        modular_addition.ModularAddition,
        parity.Parity,
        digits_anomaly.DigitsAnomaly,
        masked_language_model.MaskedLanguageModel,
        language_model.LanguageModel,
    )
}


def names() -> tuple[str, ...]:
    """Returns the names of all tasks."""
    return tuple(_TASKS)


def make(name: str, **options: Any) -> Task:
    """Returns the task of that name.

    Args:
      name: One of `names()`.
      **options: All of the task's constructor arguments; in a config, what
        `config.task` has beside the name, and all of `config.data`.

    Raises:
      ConfigError: If there is no such task, an option is unknown or missing, or has a
        value that the task refuses.
    """
    with checks.user_mistakes():
        task = _TASKS[checks.choice("task.name", name, _TASKS)]
    wanted = [field.name for field in dataclasses.fields(task)]
    for option in options:
        if option not in wanted:
            raise checks.ConfigError(
                f"{name} has no option {option!r}; it has {', '.join(wanted)}."
                f"{checks.nearest(option, wanted)}"
            )
    if missing := [option for option in wanted if option not in options]:
        raise checks.ConfigError(f"{name} also needs {', '.join(missing)}.")
    with checks.user_mistakes():
        return task(**options)
