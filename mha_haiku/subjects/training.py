"""`train`: a run with what its config asks to be recorded, as a subject."""

import os

from mha_haiku.subjects.opening import load
from mha_haiku.subjects.studies import attention_dump, observers
from mha_haiku.subjects.studies.workbench import Bench
from mha_haiku.subjects.subject import Subject
from mha_haiku.training import tasks
from mha_haiku.training.runs import configuration, loop, opening


def train(
    what: configuration.RunConfig | tasks.Task,
    workdir: str | os.PathLike,
    *,
    task: tasks.Task | None = None,
    steps: int | None = None,
    override_config: bool = False,
) -> Subject:
    """Trains a model, or resumes its run, and returns it as a subject.

    Next to what `runs.train` writes, the folder gets its attention maps, and the
    snapshots, timeline and samples that the config asks for; `show(workdir)` is their
    page. After an interrupt there are no maps; the same call resumes.

    Args:
      what: A task, such as `tasks.from_arrays` returns; or a whole config, such as
        `runs.default_config(task)`, which a task alone stands for.
      workdir: The run's folder.
      task: The task, in place of the one that a config describes.
      steps: Number of steps, instead of `config.training.steps`.
      override_config: Whether to resume even if the config differs from the run's.

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If more steps in a row are nonfinite than the config allows.
      SaveError: If the last checkpoint cannot be written.
    """
    if isinstance(what, configuration.RunConfig):
        config = what
    elif task is None:
        config, task = configuration.default_config(what), what
    else:
        raise TypeError(f"what must be a config where task is given, got {type(what)}.")
    if steps is not None:
        config = config.replace(training=dict(steps=steps))
    if config.training.seeds > 1:
        raise ValueError(
            "config.training.seeds must be 1, as a subject is one model, got "
            f"{config.training.seeds}; runs.train trains several."
        )
    summary = recorded(config, workdir, task=task, override_config=override_config)
    if not summary.interrupted:
        attention_dump.dump(Bench.load(workdir))
    return load(workdir)


def recorded(
    config: configuration.RunConfig, workdir: str | os.PathLike, **options
) -> opening.Summary | opening.SeedsSummary:
    """Trains with every observer of the laboratory; otherwise as `runs.train`."""
    kinds = observers.Timeline, observers.Snapshots, observers.Samples
    watching = [kind(config) for kind in kinds]
    return loop.train(config, workdir, observers=watching, **options)
