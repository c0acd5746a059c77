"""Tasks: one per file, made by name; or made of the user's data."""

import dataclasses
import os
from typing import Any

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import (
    labeled_texts,
    own_data,
    task_files,
    text_tasks,
    uniform_tasks,
)
from mha_haiku.training.tasks.base import Example, Kept, Task, batch
from mha_haiku.training.tasks.own_data import Wrapped, from_arrays, from_examples
from mha_haiku.training.tasks.task_files import (
    check,
    digest,
    executes,
)

__all__ = [
    "Example",
    "Kept",
    "Task",
    "Wrapped",
    "batch",
    "check",
    "digest",
    "executes",
    "from_arrays",
    "from_examples",
    "from_file",
    "from_text",
    "make",
    "model_defaults",
    "names",
    "of_name",
    "options",
    "register",
]

_TASKS = {
    task.name: task
    for task in (
        uniform_tasks.Reverse,
        text_tasks.MaskedLanguageModel,
        text_tasks.LanguageModel,
        text_tasks.Sentences,
        labeled_texts.LabeledTexts,
    )
}
# Tasks of a user's data are made only by `from_arrays` and `from_examples`.
_NAMED = _TASKS | own_data.TASKS


def names() -> tuple[str, ...]:
    """Lists the names of all tasks: the package's, then those in `configs/tasks/`."""
    return (*_TASKS, *task_files.OF_PROJECT)


def options(name: str) -> dict[str, dict[str, fields.Field]]:
    """Lists the fields that a task has in `config.task` and in `config.data`.

    The name is one of `names()`, or the file and class of your own task,
    "mine.py:MyTask"; ConfigError if there is no such task.
    """
    task = of_name(name)
    declared: dict[str, dict[str, fields.Field]] = {"task": {}, "data": {}}
    metadata = {field.name: field.metadata for field in dataclasses.fields(task)}
    for option, field in fields.declared(task).items():
        declared[metadata[option].get("section", "task")][option] = field
    return declared


def model_defaults(name: str) -> dict[str, Any]:
    """Lists `config.model` values that suit a task, by dotted name; see `options`."""
    task = of_name(name)
    implied = {"family": "causal"} if task.continues else {}
    implied |= {"output.pool": "mean"} if task.labels_whole else {}
    return {**implied, **task.model_defaults}


def make(name: str, *, kept: Kept | None = None, **values: Any) -> Task:
    """Makes the task of that name, with options that differ from their defaults.

    They are the fields of `config.task`, except the name, and of `config.data`; `kept`
    is what `Task.keep` returned when a run with this task began.

    Raises:
      ConfigError: If there is no such task or option, or a value is invalid.

    Example:
      >>> mh.tasks.make("modular_addition", modulus=11)
      ModularAddition(modulus=11, train_fraction=0.8)
    """
    task = of_name(name)
    allowed = [field.name for field in dataclasses.fields(task) if field.init]
    for option in values:
        if option not in allowed:
            raise checks.ConfigError(
                f"{name} has no option {option!r}; it has {', '.join(allowed)}."
                f"{checks.nearest(option, allowed)}"
            )
    if kept is not None:
        values["kept"] = kept
    try:
        with checks.user_mistakes():
            return task(**values)
    except checks.ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if not task_files.is_name(name):
            raise
        raise checks.ConfigError(task_files.raised(name, error)) from error


def from_text(path: str | os.PathLike, **options: Any) -> Task:
    """Makes the task to predict the next token of a text, for `mha_haiku.train`.

    The path is a UTF-8 file or a folder of them; options are options of the task
    "language_model", such as `sequence_length`, `tokenizer` and `vocabulary_size`.
    ConfigError if the text cannot be read or is too short, or an option is invalid.

    Example:
      >>> import pathlib
      >>> text = "It was a dark and stormy night. " * 40
      >>> _ = pathlib.Path("night.txt").write_text(text)
      >>> task = mh.tasks.from_text("night.txt", sequence_length=16)
      >>> task.encode("stormy")
      array([14, 15, 12, 13, 10, 17], dtype=int32)
    """
    return make("language_model", path=os.fspath(path), **options)


def from_file(path: str | os.PathLike, **options: Any) -> Task:
    r"""Makes the task of a file: its text, or a table of texts for which it is asked.

    A CSV or TSV file names its columns in the first line, a line of a `.jsonl` file is
    an object. The columns `text` and `label` make the task to predict labels, `text`
    and `target` the task to write another text. Any other file, and a folder, is a
    text, as in `from_text`. Options are as in `from_text` and `from_examples`.

    Raises:
      ConfigError: If the file cannot be read, or there is no such option.

    Example:
      >>> import pathlib
      >>> lines = [f"{i} plus {i},{'odd' if i % 2 else 'even'}" for i in range(50)]
      >>> _ = pathlib.Path("sums.csv").write_text("\n".join(["text,label", *lines]))
      >>> task = mh.tasks.from_file("sums.csv", sequence_length=12)
      >>> task.class_label(0), task.num_classes
      ('even', 2)
    """
    path = os.fspath(path)
    if not path.endswith((".csv", ".tsv", ".jsonl")):
        return from_text(path, **options)
    if any("target" in row for row in labeled_texts.rows_of(path)[:1]):
        pairs = labeled_texts.read_table(path, "target")
        return from_examples(pairs, labels=False, **options)
    return make("labeled_texts", path=path, **options)


def register(task: type[Task]) -> str:
    """Registers a task class in this process; returns its `config.task.name`.

    A class in a file is named "mine.py:MyTask" and needs no registration.

    Raises:
      ConfigError: If it is not a frozen dataclass with everything that a task needs.
    """
    if _NAMED.get(getattr(task, "name", "")) is task:
        return task.name
    task_files.check_class(getattr(task, "__qualname__", repr(task)), task)
    return task_files.register(task)


def of_name(name: str) -> type[Task]:
    """Finds the class of a task; see `options`."""
    if task_files.is_name(name):
        return task_files.load(name)
    if name in _NAMED:
        return _NAMED[name]
    try:
        checks.choice("config.task.name", name, names())
    except ValueError as error:
        raise checks.ConfigError(
            f"{error}\nYour own task is named by its file and class, mine.py:MyTask."
        ) from error
    return task_files.of_project(name)
