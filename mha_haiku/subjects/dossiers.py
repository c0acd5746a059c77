"""The page of a folder of maps: its maps, and the importance of their heads."""

import contextlib
import dataclasses
import os
from pathlib import Path

from mha_haiku.core import checks
from mha_haiku.lab import heads
from mha_haiku.records import Heads, archive, map_set
from mha_haiku.training.runs import folders


def of_folder(folder: str | os.PathLike) -> map_set.Dossier:
    """Makes the dossier of a folder's `maps.npz` and its run."""
    folder = checks.as_path(folder)
    above = folder.resolve().parents[:3]
    root = next((x for x in above if folders.Folder(x).config.exists()), None)
    maps = _with_importance(map_set.MapSet.load(folder / "maps.npz"), root)
    maps = dataclasses.replace(maps, step=None)
    note = "The exact numbers are in maps.npz next to this page."
    return map_set.Dossier(maps.name, (maps,), notes=(note,))


def _with_importance(maps: map_set.MapSet, root: Path | None) -> map_set.MapSet:
    """Adds the importance of its heads to the set, if it was measured."""
    if root is None or any(layer.index is None for layer in maps.layers):
        return maps
    path = folders.Folder(root).heads / "head_importance.npz"
    written_by = command("head_importance", root)
    if path.exists():
        # What an earlier version measured is to be measured again, as of another step.
        with contextlib.suppress(archive.FormatError):
            importance = Heads.load(path, written_by=written_by)
            if importance.step == maps.step and _are_measures(importance):
                others = {x: y for x, y in maps.columns.items() if x != "importance"}
                columns = others | importance.at(maps.layers)
                return dataclasses.replace(maps, columns=columns)
    return dataclasses.replace(maps, missing=(("importance", written_by),))


def _are_measures(record: Heads) -> bool:
    """Checks whether all columns are measures of importance, as they are labeled."""
    for name, column in record.columns.items():
        if name not in heads.MEASURES:
            return False
        start, _, end = heads.MEASURES[name].label.partition("{metric}")
        if not (column.label.startswith(start) and column.label.endswith(end)):
            return False
    return True


def command(script: str, root: str | os.PathLike) -> str:
    """Formats the command line of a script for a run's folder, for a message."""
    root = Path(root)
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    return f"python -m mha_haiku {script} --workdir={root}"
