"""Records of a run while it trains, and pictures of how it learned.

`Timeline` follows the heads, `Snapshots` their maps.

P points, L layers, H heads of a layer.
"""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, fields, models
from mha_haiku.lab import heads
from mha_haiku.records.heads import ROLE, Column
from mha_haiku.showing import curves, saving
from mha_haiku.subjects import computing, dossiers
from mha_haiku.subjects.subject import Subject, check_task
from mha_haiku.subjects.verbs import dumping
from mha_haiku.training import tasks
from mha_haiku.training.runs import (
    configuration,
    files,
    folders,
    loop,
    metrics_log,
)

_EXAMPLES = 64
_POSITIONS = 2**13  # of all examples
_GRADIENT = heads.MEASURES["gradient"]


class _Study(loop.Observer):
    """A base class of observers that study a run while it trains."""

    _start: Callable[[int], None]  # prepares looks, from a step on

    def begin(
        self,
        folder: folders.Folder,
        config: configuration.RunConfig,
        task: tasks.Task,
        step: int,
    ) -> None:
        model = folders.make_model(config.model, task)  # in this process only
        name = folder.root.resolve().name
        known: dict[str, Any] = dict(config=config, task=task, step=step, folder=folder)
        subject = Subject(model, None, name, progress=computing.silent, **known)
        self._subject, self._folder = check_task(subject, "training"), folder
        self._start(step)


class Timeline(_Study):
    """Appends to `timeline.jsonl` in a run's folder of heads.

    A line has `step`, the `roles` of all heads, and `scores`: scores of roles by name,
    and the `gradient` importance, as lists of L lists, with None where a layer has
    fewer heads. With several kinds of heads `layers` has labels such as "cross 0".
    """

    def __init__(self, training: configuration.TrainingConfig):
        super().__init__(training.timeline_every)

    def _start(self, step: int) -> None:
        """Opens the file and drops its lines of steps after `step`."""
        path = self._folder.timeline
        self._log = files.LineWriter(path, last_step=step)
        lines = files.read_lines(path)
        self._last = lines[-1]["step"] if lines else -1

    def look(self, step: int, params: Any) -> None:
        """Appends the line of a step, unless the file has that step already."""
        if step > self._last:
            self._log.append({"step": step, **self._line(params)})
            self._last = step

    def end(self) -> None:
        """Closes the file."""
        self._log.close()

    def _line(self, params: Any) -> dict[str, Any]:
        subject = self._subject
        count = computing.batch_size(subject, _EXAMPLES, _POSITIONS)
        batches = [computing.held_out(subject, range(count))]
        roles = heads.roles(
            subject.model,
            params,
            batches,
            separators=computing.separators(subject),
            align=subject.task.alignments,
        )
        of = heads.Measured(subject.model, heads.metrics.loss, params, batches)
        scores = {x: y.mean for x, y in roles.numbers.items() if x in heads.SCORES}
        scores["gradient"] = _GRADIENT.measure(of).mean
        none = np.array(None)  # an object, as NaN is no JSON
        lists = {x: np.where(np.isnan(y), none, y).tolist() for x, y in scores.items()}
        line = {"roles": roles.names[ROLE].tolist(), "scores": lists}
        layers = models.heads_of_layers(subject.config.model)
        if any(layer.kind for layer in layers):
            line = {"layers": [layer.label for layer in layers], **line}
        return line


class Snapshots(_Study):
    """Writes `attention/snapshots/<step>/maps.npz` at some of a run's reports.

    The `count` snapshots are spread evenly in the logarithm of the step, from the first
    report to the end, with maps of the same examples.
    """

    def __init__(self, training: configuration.TrainingConfig, count: int):
        super().__init__(training.report_every if count else 0)
        self._steps = spread(training.steps, training.report_every, count)

    def _start(self, step: int) -> None:
        """Removes snapshots of steps after `step`, which will be taken again."""
        snapshots = self._folder.snapshots
        for each in dossiers.steps_of(snapshots):
            if each > step:
                shutil.rmtree(snapshots / str(each))

    def wants(self, step: int) -> bool:
        """Checks whether `step` is one of the snapshots' steps."""
        return step in self._steps

    def look(self, step: int, params: Any) -> None:
        """Writes the maps at a step, unless they are there."""
        out = self._folder.snapshots / str(step)
        if (out / "maps.npz").exists():
            return
        maps = dumping.measured(  # on this process alone
            self._subject.replace(params=params, step=step),
            means=False,
            devices=jax.local_devices()[:1],
        )
        maps.save(out / "maps.npz")


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


class _Line(NamedTuple):
    """A line of timeline.jsonl."""

    step: int
    scores: Mapping[str, tuple[tuple[float | None, ...], ...]]
    roles: Any = None
    layers: tuple[str, ...] = ()


def timeline(path: Path) -> functools.partial | None:
    """Draws a timeline.jsonl; returns None if it has no lines.

    Its arguments are the steps `[P]`, and scores `[P, L, H]`, NaN where there is no
    head.
    """
    if not (records := files.read_lines(path)):
        return None
    try:
        lines: list[_Line] = [fields.decoded(_Line, x, "") for x in records]
        shapes = {tuple((x, *map(len, y)) for x, y in z.scores.items()) for z in lines}
        if len(shapes) > 1:
            raise ValueError("all lines must have scores of the same heads.")
    except ValueError as error:
        raise checks.ConfigError(f"{path} cannot be used: {error}") from None
    scores = {}
    for name in lines[0].scores:
        values = [line.scores[name] for line in lines]
        label, unit = heads.SCORES.get(name, name), ""
        if name == "gradient":
            label, unit = _GRADIENT.label, _GRADIENT.unit or ""
        scores[name] = Column(np.array(values, np.float64), unit, label)
    return functools.partial(
        curves.timeline,
        np.array([line.step for line in lines]),
        scores,
        title=f"Heads of {path.resolve().parents[1].name} while they learn",
        labels=lines[0].layers,
    )


def learning_curve(path: Path) -> functools.partial | None:
    """Draws a metrics.jsonl; returns None if it has no reports.

    The baselines come from the summary in the same folder.
    """
    if not (reports := metrics_log.read(path)):
        return None
    folder = folders.Folder(path.resolve().parent)
    config, summary = folders.read_config(folder), files.read_json(folder.summary) or {}
    task = "" if config is None else f" ({config.task.name})"
    with checks.user_mistakes():
        baseline = fields.decoded(
            dict[str, float] | None, summary.get("baseline"), "baseline"
        )
    return functools.partial(
        curves.learning,
        reports,
        title=f"{folder.root.name}{task}: loss and accuracy while it learned",
        baseline=baseline,
        baseline_name=summary.get("baseline_name", "baseline"),
    )


def draw(workdir: str | os.PathLike, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Writes the pictures that a run has data for, in its folder.

    These are `attention/learning_curve.png` and `heads/timeline.png`.
    """
    folder, written = folders.Folder(checks.as_path(workdir)), []
    for path, picture in (
        (folder.attention / "learning_curve.png", learning_curve(folder.metrics)),
        (folder.heads / "timeline.png", timeline(folder.timeline)),
    ):
        if picture is not None:
            written += saving.write_pictures(path, picture, formats)
    return written
