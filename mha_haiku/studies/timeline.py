"""Roles and importance of heads during training: a line per evaluation.

P points, L layers, H heads of a layer.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku import checks, heads, models, report, tasks
from mha_haiku.report.heads import PerHead
from mha_haiku.runs import files, folders, loop
from mha_haiku.studies import workbench
from mha_haiku.training import evaluation

if TYPE_CHECKING:
    import ml_collections

_EXAMPLES = 64
_POSITIONS = 2**13  # of all examples
_GRADIENT = heads.MEASURES["gradient"]


class Timeline(loop.Observer):
    """Appends to `timeline.jsonl` in a run's folder of heads.

    A line has `step`, the `roles` of all heads, and `scores`: the scores of roles by
    their names, and the `gradient` importance. Each is a list of L lists, with None
    where a layer has fewer heads. Where heads are of several kinds, `layers` has what
    each of the L is called: "cross 0".
    """

    def begin(
        self,
        folder: folders.Folder,
        config: "ml_collections.ConfigDict",
        task: tasks.Task,
        step: int,
    ) -> None:
        """Opens the file and drops its lines of steps after `step`."""
        self._log = files.LineWriter(folder.timeline, last_step=step)
        lines = read(folder.timeline)
        self._last = lines[-1]["step"] if lines else -1
        self._model = folders.make_model(config, task)  # in this process only
        layers = models.heads_of_layers(config.model)
        self._named = {}
        if any(layer.kind for layer in layers):
            self._named["layers"] = [layer.label for layer in layers]
        self._align = task.alignments
        longest = max(task.sequence_length, task.target_length or 0)
        count = max(1, min(_EXAMPLES, _POSITIONS // longest))
        indices = np.arange(count, dtype=np.int32)
        self._batch = evaluation.held_out_batch(
            task, config.seed, task.held_out_data, indices
        )

    def look(self, step: int, params: Any) -> None:
        """Observes the heads at a step, unless the file has that step already.

        Args:
          step: The step.
          params: The parameters at that step, unstacked.
        """
        if step <= self._last:
            return
        roles = heads.roles(self._model, params, [self._batch], align=self._align)
        of = heads.Subject(self._model, heads.metrics.loss, params, [self._batch])
        scores = {**roles.scores, "gradient": _GRADIENT.measure(of).mean}
        self._log.append(
            {
                "step": step,
                **self._named,
                "roles": roles.names.tolist(),
                "scores": {name: _plain(values) for name, values in scores.items()},
            }
        )
        self._last = step

    def end(self) -> None:
        """Closes the file."""
        self._log.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a timeline; a last line that was cut off is left out.

    Args:
      path: The file; may be missing, which gives no lines.
    """
    return files.read_lines(path)


def curves(lines: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, dict[str, PerHead]]:
    """Returns steps `[P]`, and scores `[P, L, H]`, NaN where there is no head."""
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
    """Gives the picture of a timeline of at least one line, as the bytes of a file."""
    lines = read(path)
    steps, scores = curves(lines)
    name = path.resolve().parents[1].name
    return functools.partial(
        report.curves.timeline,
        steps,
        scores,
        title=f"Heads of {name} while they learn",
        labels=lines[0].get("layers", []),
    )


def draw(workdir: str | os.PathLike, formats: Sequence[str] = ("png",)) -> Path | None:
    """Writes `timeline.png` into a run's folder of heads.

    Returns:
      The path of the first picture; None without a timeline or without matplotlib.
    """
    folder = folders.Folder(checks.as_path(workdir))
    lines = read(folder.timeline)
    if not lines or not report.drawing.is_possible():
        return None
    path = folder.heads / "timeline.png"
    return workbench.write_pictures(path, picture(folder.timeline), formats)[0]


def _plain(values: np.ndarray) -> list:
    return [[None if np.isnan(x) else float(x) for x in row] for row in values]
