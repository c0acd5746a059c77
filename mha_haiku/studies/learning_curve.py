"""How a run learned: the picture of its metrics.jsonl."""

import os
from pathlib import Path

from mha_haiku import report
from mha_haiku.runs import files, folders, metrics_log


def draw(workdir: str | os.PathLike) -> Path | None:
    """Writes `learning_curve.png` beside the run's maps.

    Args:
      workdir: The run's folder.

    Returns:
      The path of the picture; None where nothing is reported, or without matplotlib.
    """
    folder = folders.Folder(Path(workdir).expanduser())
    reports = metrics_log.read(folder.metrics)
    if not reports or not report.drawing.is_possible():
        return None
    name, task = folder.root.resolve().name, folders.read_config(folder)["task"]["name"]
    summary = files.read_json(folder.summary) or {}
    picture = report.curves.learning(
        reports,
        title=f"{name} ({task}): loss and accuracy while it learned",
        baseline=summary.get("baseline"),
        baseline_name=summary.get("baseline_name", "baseline"),
    )
    return files.write(folder.attention / "learning_curve.png", picture)
