"""Heads of a run while it trains, and the picture of how it learned."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mha_haiku.core import checks
from mha_haiku.lab.heads import model_runs
from mha_haiku.showing import curves, result_files
from mha_haiku.subjects import monitors
from mha_haiku.training import tasks
from mha_haiku.training.runs import (
    configuration,
    files,
    folders,
    loop,
    metrics_log,
)


class Recorder(loop.Observer):
    """Records what heads do on held-out examples of a run while it trains."""

    def begin(
        self,
        folder: folders.Folder,
        config: configuration.RunConfig,
        task: tasks.Task,
        step: int,
    ) -> None:
        """Continues the table in the run's folder; see `mh.monitor`."""
        model = folders.make_model(config.model, task)  # in this process only
        run = folders.Run(config, task, model, None, step)
        example = run.examples(config.attention.examples)
        self._monitor = monitors.Monitor(
            lambda params: model_runs.run(model, params, example),
            every=1,
            out=folder.heads,
            first_step=step,
        )

    def look(self, step: int, params: Any) -> None:
        """Records the heads at a step."""
        self._monitor.step = step
        self._monitor(params)


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
