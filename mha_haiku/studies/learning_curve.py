"""How a run learned: the picture of its metrics.jsonl."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from mha_haiku import checks, report
from mha_haiku.runs import files, folders, metrics_log
from mha_haiku.studies import workbench


def draw(workdir: str | os.PathLike, formats: Sequence[str] = ("png",)) -> Path | None:
    """Writes `learning_curve.png` beside the run's maps.

    Returns:
      The path of the first picture; None where nothing is reported, or without
      matplotlib.
    """
    folder = folders.Folder(checks.as_path(workdir))
    reports = metrics_log.read(folder.metrics)
    if not reports or not report.drawing.is_possible():
        return None
    name, task = folder.root.resolve().name, folders.read_config(folder)["task"]["name"]
    summary = files.read_json(folder.summary) or {}
    picture = functools.partial(
        report.curves.learning,
        reports,
        title=f"{name} ({task}): loss and accuracy while it learned",
        baseline=summary.get("baseline"),
        baseline_name=summary.get("baseline_name", "baseline"),
    )
    path = folder.attention / "learning_curve.png"
    return workbench.write_pictures(path, picture, formats)[0]
