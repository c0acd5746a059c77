"""How a run and its heads learned: a line per evaluation, and what is drawn of it.

P points, L layers, H heads of a layer.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab import heads
from mha_haiku.showing import curves
from mha_haiku.showing.map_set import PerHead
from mha_haiku.subjects.studies import workbench
from mha_haiku.training.runs import files, folders, metrics_log

_EXAMPLES = 64
_POSITIONS = 2**13  # of all examples
_GRADIENT = heads.MEASURES["gradient"]


class Timeline(workbench.TrainingStudy):
    """Appends to `timeline.jsonl` in a run's folder of heads.

    A line has `step`, the `roles` of all heads, and `scores`: of roles by their names,
    and the `gradient` importance. Each is a list of L lists, with None where a layer
    has fewer heads. With several kinds of heads `layers` has labels such as "cross 0".
    """

    def start(self, step: int) -> None:
        """Opens the file and drops its lines of steps after `step`."""
        run, path = self._bench.run, self._bench.folder.timeline
        self._log = files.LineWriter(path, last_step=step)
        lines = files.read_lines(path)
        self._last = lines[-1]["step"] if lines else -1
        layers = models.heads_of_layers(run.config.model)
        self._named = {}
        if any(layer.kind for layer in layers):
            self._named["layers"] = [layer.label for layer in layers]
        count = self._bench.batch_size(_EXAMPLES, _POSITIONS)
        self._batches = [self._bench.held_out(range(count))]

    def look(self, step: int, params: Any) -> None:
        """Observes the heads at a step, unless the file has that step already."""
        if step <= self._last:
            return
        run, batches = self._bench.run, self._batches
        roles = heads.roles(run.model, params, batches, align=run.task.alignments)
        of = heads.Measured(run.model, heads.metrics.loss, params, batches)
        scores = {**roles.scores, "gradient": _GRADIENT.measure(of).mean}
        self._log.append(
            {
                "step": step,
                **self._named,
                "roles": roles.names.tolist(),
                "scores": {
                    name: np.where(np.isnan(x), None, x).tolist()
                    for name, x in scores.items()
                },
            }
        )
        self._last = step

    def end(self) -> None:
        """Closes the file."""
        self._log.close()


def scores_over_steps(
    lines: Sequence[Mapping[str, Any]],
) -> tuple[np.ndarray, dict[str, PerHead]]:
    """Collects steps `[P]`, and scores `[P, L, H]`, NaN where there is no head."""
    steps = np.array([line["step"] for line in lines])
    scores = {}
    for name in lines[0]["scores"]:
        values = [line["scores"][name] for line in lines]
        label, unit = heads.SCORES.get(name, name), ""
        if name == "gradient":
            label, unit = _GRADIENT.label, _GRADIENT.unit
        scores[name] = PerHead(np.array(values, np.float64), unit, label)
    return steps, scores


def picture(path: Path) -> functools.partial:
    """Draws the picture of a timeline of at least one line."""
    lines = files.read_lines(path)
    steps, scores = scores_over_steps(lines)
    name = path.resolve().parents[1].name
    return functools.partial(
        curves.timeline,
        steps,
        scores,
        title=f"Heads of {name} while they learn",
        labels=lines[0].get("layers", []),
    )


def draw(workdir: str | os.PathLike, formats: Sequence[str] = ("png",)) -> Path | None:
    """Writes `timeline.png` into a run's folder of heads; returns its path or None."""
    folder = folders.Folder(checks.as_path(workdir))
    if not files.read_lines(folder.timeline):
        return None
    path = folder.heads / "timeline.png"
    written = workbench.write_pictures(path, picture(folder.timeline), formats)
    return next(iter(written), None)


def draw_metrics(
    workdir: str | os.PathLike, formats: Sequence[str] = ("png",)
) -> Path | None:
    """Writes `learning_curve.png` next to the run's maps; returns its path or None."""
    folder = folders.Folder(checks.as_path(workdir))
    reports = metrics_log.read(folder.metrics)
    if not reports:
        return None
    name, task = folder.root.resolve().name, folders.read_config(folder).task.name
    summary = files.read_json(folder.summary) or {}
    picture = functools.partial(
        curves.learning,
        reports,
        title=f"{name} ({task}): loss and accuracy while it learned",
        baseline=summary.get("baseline"),
        baseline_name=summary.get("baseline_name", "baseline"),
    )
    path = folder.attention / "learning_curve.png"
    return next(iter(workbench.write_pictures(path, picture, formats)), None)
