"""What heads do and how much they matter, while they learn: a line per point in time.

L layers, H heads of a layer.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_haiku import heads, tasks
from mha_haiku.runs import files, folders, loop
from mha_haiku.studies import head_importance
from mha_haiku.training import evaluation

if TYPE_CHECKING:
    import ml_collections

_EXAMPLES = 64
_POSITIONS = 2**13  # of all examples


class Timeline(loop.Observer):
    """Appends to `timeline.jsonl` in a run's folder of heads.

    A line has `step`, the `roles` of all heads, and under `scores` the numbers that
    roles are given by and the `gradient` importance, each as a list of L lists; None
    where a layer has fewer heads.
    """

    def begin(
        self,
        folder: folders.Folder,
        config: "ml_collections.ConfigDict",
        task: tasks.Task,
        step: int,
    ) -> None:
        """Opens the file; what it holds of steps after `step` is dropped."""
        self._log = files.LineWriter(folder.timeline, last_step=step)
        lines = read(folder.timeline)
        self._last = lines[-1]["step"] if lines else -1
        self._model = folders.make_model(config, task)  # of this process alone
        count = max(1, min(_EXAMPLES, _POSITIONS // task.sequence_length))
        indices = np.arange(count, dtype=np.int32)
        self._batch = evaluation.held_out_batch(
            task, config.seed, task.held_out_data, indices
        )

    def look(self, step: int, params: Any) -> None:
        """Observes the heads at a step, unless that has been done.

        Args:
          step: The step.
          params: The parameters then, of looped layers.
        """
        if step <= self._last:
            return
        found = heads.roles(self._model, params, [self._batch])
        of = heads.Subject(
            self._model, head_importance.loss_of_examples, params, [self._batch]
        )
        scores = {**found.scores, "gradient": heads.gradient(of).mean}
        line = {
            "step": step,
            "roles": found.names.tolist(),
            "scores": {name: _plain(values) for name, values in scores.items()},
        }
        self._log.append(line)
        self._last = step

    def end(self) -> None:
        """Closes the file."""
        self._log.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a timeline; a last line that was cut off is left out.

    Args:
      path: Its file; where there is none there are no lines.
    """
    return files.read_lines(path)


def curves(lines: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns steps `[P]`, and of each score `[P, L, H]`, NaN where there is no head.

    Args:
      lines: Of `read`, at least one.
    """
    steps = np.array([line["step"] for line in lines])
    names = lines[0]["scores"]
    scores = {
        name: np.array([line["scores"][name] for line in lines], np.float64)
        for name in names
    }
    return steps, scores


def of_run(
    workdir: str | os.PathLike,
) -> tuple[Path, np.ndarray, dict[str, np.ndarray], str] | None:
    """Returns what `report.write_timeline` draws of a run, or None without a timeline.

    Args:
      workdir: The run's folder.
    """
    folder = folders.Folder(Path(workdir).expanduser())
    lines = read(folder.timeline)
    if not lines:
        return None
    steps, scores = curves(lines)
    return folder.heads, steps, scores, f"Heads of {folder.root.name} while they learn"


def _plain(values: np.ndarray) -> list:
    return [[None if np.isnan(x) else float(x) for x in row] for row in values]
