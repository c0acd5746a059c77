"""Tasks: one per file, made by name."""

import dataclasses
from typing import Any

from mha_haiku import checks, fields
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
from mha_haiku.tasks.base import Example, Kept, Task, batch

__all__ = ["Example", "Kept", "Task", "batch", "make", "names", "options"]

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


def options(name: str) -> dict[str, dict[str, fields.Field]]:
    """Returns the fields that a task has in `config.task` and in `config.data`.

    Args:
      name: One of `names()`.

    Raises:
      ConfigError: If there is no such task.
    """
    found: dict[str, dict[str, fields.Field]] = {"task": {}, "data": {}}
    for field in dataclasses.fields(_task(name)):
        found[field.metadata["section"]][field.name] = field.metadata["declared"]
    return found


def make(name: str, *, kept: Kept | None = None, **given: Any) -> Task:
    """Returns the task of that name.

    Args:
      name: One of `names()`.
      kept: What `Task.keep` of the task of a run returned.
      **given: The task's options that are not as they are by default; in a config, what
        `config.task` has beside the name, and all of `config.data`.

    Raises:
      ConfigError: If there is no such task, an option is unknown, or has a value that
        the task refuses.
    """
    task = _task(name)
    known = [field.name for field in dataclasses.fields(task)]
    for option in given:
        if option not in known:
            raise checks.ConfigError(
                f"{name} has no option {option!r}; it has {', '.join(known)}."
                f"{checks.nearest(option, known)}"
            )
    with checks.user_mistakes():
        return task(**given) if kept is None else task(**given, kept=kept)


def _task(name: str) -> type[Task]:
    with checks.user_mistakes():
        return _TASKS[checks.choice("config.task.name", name, _TASKS)]
