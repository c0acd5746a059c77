"""Maps of a run while it trains, and the picture of how it learned."""

import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.showing import curves, result_files
from mha_haiku.subjects import computation, dossiers
from mha_haiku.subjects.subject import Subject, check_task
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training import tasks
from mha_haiku.training.runs import (
    configuration,
    files,
    folders,
    loop,
    metrics_log,
)


class Snapshots(loop.Observer):
    """Writes `attention/snapshots/<step>/maps.npz` at some of a run's reports.

    The `count` snapshots are spread evenly in the logarithm of the step, from the first
    report to the end, with maps of the same examples.
    """

    def __init__(self, training: configuration.TrainingConfig, count: int):
        super().__init__(training.report_every if count else 0)
        self._steps = spread(training.steps, training.report_every, count)

    def begin(
        self,
        folder: folders.Folder,
        config: configuration.RunConfig,
        task: tasks.Task,
        step: int,
    ) -> None:
        """Removes snapshots of steps after `step`, which will be taken again."""
        model = folders.make_model(config.model, task)  # in this process only
        name = folder.root.resolve().name
        run: dict[str, Any] = dict(config=config, task=task, step=step, folder=folder)
        subject = Subject(model, None, name, progress=computation.silent, **run)
        self._subject, self._folder = check_task(subject, "training"), folder.snapshots
        for each in dossiers.steps_of(self._folder):
            if each > step:
                shutil.rmtree(self._folder / str(each))

    def wants(self, step: int) -> bool:
        """Checks whether `step` is one of the snapshots' steps."""
        return step in self._steps

    def look(self, step: int, params: Any) -> None:
        """Writes the maps at a step, unless they are there."""
        path = self._folder / str(step) / "maps.npz"
        if path.exists():
            return
        maps = dumps.measured(  # on this process alone
            self._subject.replace(params=params, step=step),
            means=False,
            devices=jax.local_devices()[:1],
        )
        maps.save(path)


def spread(last: int, every: int, count: int) -> tuple[int, ...]:
    """Spreads `count` steps evenly in their logarithm, with the last one included.

    All but the last are multiples of `every`; if there are too few, there are fewer.
    """
    reports = -(-last // every)
    count = min(count, reports)
    places = np.arange(count)
    numbers = np.geomspace(1, reports, count).round().astype(int)
    # All different, and room for those that follow.
    shifted = np.maximum.accumulate(numbers - places)
    numbers = np.minimum(shifted, reports - count + 1) + places
    numbers[-1:] = reports  # also where there is one
    return tuple(np.minimum(numbers * every, last).tolist())


def learning_curve(path: Path) -> functools.partial | None:
    """Draws a metrics.jsonl; returns None if it has no reports.

    The baselines come from the summary in the same folder.
    """
    if not (reports := metrics_log.read(path)):
        return None
    folder = folders.Folder(path.resolve().parent)
    config, summary = folders.read_config(folder), files.read_json(folder.summary) or {}
    task = "" if config is None else f" ({config.task.name})"
    return functools.partial(
        curves.learning,
        reports,
        title=f"{folder.root.name}{task}: loss and accuracy while it learned",
        baseline=summary.get("baseline"),
        baseline_name=summary.get("baseline_name", "baseline"),
    )


def draw(workdir: str | os.PathLike, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Writes `attention/learning_curve.png` in a run's folder, if it has reports."""
    folder = folders.Folder(checks.as_path(workdir))
    picture = learning_curve(folder.metrics)
    if picture is None:
        return []
    path = folder.attention / "learning_curve.png"
    return result_files.write_pictures(path, picture, formats)
