"""Pictures and a page of a run's attention, made from its saved arrays alone.

Nothing here runs a model: what `write` reads is the `maps.npz` that a run left, so the
report of any run can be made again, on any machine, without an accelerator. `heads`
shows what heads do, from numbers per head.
"""

import importlib.util
import logging
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from mha_haiku.report import figures, heads, importance, maps, page
from mha_haiku.report import timeline as timeline_report

Curve = importance.Curve

_PICTURE = re.compile(r"layer_\d{2,}\.png")


def write(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes one picture per layer and `index.html` beside a folder's `maps.npz`.

    Each file appears whole or not at all. Pictures of layers that `maps.npz` no longer
    holds are removed, so that the folder never mixes two runs. Where matplotlib is not
    installed a warning is logged and the page alone is written.

    Args:
      folder: Where `maps.npz` is, and where the report goes.

    Returns:
      The written files: `layer_00.png`, `layer_01.png`, ..., then `index.html`.

    Raises:
      ConfigError: If `maps.npz` is missing or is not what a run writes.
    """
    folder = pathlib.Path(folder)
    saved = maps.load(folder / "maps.npz")
    written = []
    drawn = figures.pictures(saved)
    if not _can_draw():
        drawn = ()
    for layer, picture in enumerate(drawn):
        written.append(_replace(folder / f"layer_{layer:02d}.png", picture))
    for path in folder.iterdir():
        if _PICTURE.fullmatch(path.name) and path not in written:
            path.unlink()
    written.append(_replace(folder / "index.html", page.render(saved).encode()))
    return written


def write_heads(
    folder: str | os.PathLike[str],
    means: heads.Means,
    *,
    title: str,
    layers: Sequence[int],
) -> pathlib.Path | None:
    """Writes `head_statistics.png`: a heat map of each statistic, heads by layer.

    Args:
      folder: Where the picture goes.
      means: `[L, H]` of each statistic by its name; see `heads`.
      title: Of which run, and over what.
      layers: The number of each of the L layers.

    Returns:
      The picture; None, with a warning logged, where matplotlib is not installed.
    """
    if not _can_draw():
        return None
    path = pathlib.Path(folder) / "head_statistics.png"
    return _replace(path, heads.picture(means, title=title, layers=layers))


def write_importance(
    folder: str | os.PathLike[str],
    measures: importance.Measures,
    *,
    title: str,
    head_names: Sequence[Sequence[int]],
) -> pathlib.Path | None:
    """Writes `head_importance.png`: how much heads matter, by each measure.

    Args:
      folder: Where the picture goes.
      measures: By its name, the mean and the standard error of each, `[L, H]`.
      title: Of which run, and over what.
      head_names: For each layer the names of its heads.

    Returns:
      The picture; None, with a warning logged, where matplotlib is not installed.
    """
    if not _can_draw():
        return None
    path = pathlib.Path(folder) / "head_importance.png"
    drawn = importance.heat_maps(measures, title=title, head_names=head_names)
    return _replace(path, drawn)


def write_pruning(
    folder: str | os.PathLike[str], curve: importance.Curve, *, title: str
) -> pathlib.Path | None:
    """Writes `pruning.png`: what is lost and gained with fewer heads.

    Args:
      folder: Where the picture goes.
      curve: A point per pruned model.
      title: Of which run.

    Returns:
      The picture; None, with a warning logged, where matplotlib is not installed.
    """
    if not _can_draw():
        return None
    path = pathlib.Path(folder) / "pruning.png"
    return _replace(path, importance.curves(curve, title=title))


def write_timeline(
    folder: str | os.PathLike[str],
    steps: np.ndarray,
    scores: Mapping[str, np.ndarray],
    title: str,
) -> pathlib.Path | None:
    """Writes `timeline.png`: what heads do, and how much they matter, over steps.

    Args:
      folder: Where the picture goes.
      steps: `[P]`.
      scores: `[P, L, H]` of each score by its name.
      title: Of which run.

    Returns:
      The picture; None, with a warning logged, where matplotlib is not installed.
    """
    if not _can_draw():
        return None
    path = pathlib.Path(folder) / "timeline.png"
    return _replace(path, timeline_report.picture(steps, scores, title=title))


def _can_draw() -> bool:
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    message = "No pictures: matplotlib is missing (pip install 'mha_haiku[plots]')."
    logging.getLogger(__name__).warning(message)
    return False


def _replace(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """Puts `content` at `path` in one step; a reader never sees half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
