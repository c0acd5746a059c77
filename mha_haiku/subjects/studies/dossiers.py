"""Joins what lies in a run's folder to the dossier of a page: maps, numbers, roles.

These are statistics, importance where it was measured, and snapshots of the training.
Nothing is run.
"""

import dataclasses
import os
from pathlib import Path

from mha_haiku.core import attention, checks
from mha_haiku.showing import map_set
from mha_haiku.showing.map_set import MapSet
from mha_haiku.subjects.studies import workbench
from mha_haiku.training.runs import folders


def of_maps(folder: str | os.PathLike) -> map_set.Dossier:
    """Makes a dossier of the `maps.npz` of a folder."""
    folder = checks.as_path(folder)
    own = _with_importance(MapSet.load(folder / "maps.npz"), _run_of(folder))
    moments = _snapshots(folder / "snapshots")
    if moments and own.step is not None:
        # The last of the training may be a snapshot as well.
        moments = [each for each in moments if each.step != own.step]
        moments.append(dataclasses.replace(own, name=f"step {own.step}"))
        moments.sort(key=lambda each: each.step)
    else:
        moments = [dataclasses.replace(own, step=None)]
    note = "The exact numbers are in maps.npz next to this page."
    return map_set.Dossier(own.name, tuple(moments), notes=(note,))


def steps_of(snapshots: Path) -> list[int]:
    """Lists the steps of the snapshots in a folder of these, in order."""
    paths = snapshots.glob("*/maps.npz")
    return sorted(int(path.parent.name) for path in paths if path.parent.name.isdigit())


def _with_importance(maps: MapSet, root: Path | None) -> MapSet:
    """Adds the importance of its heads to the set, where it was measured."""
    if root is None or any(layer.index is None for layer in maps.layers):
        return maps
    path = folders.Folder(root).heads / "head_importance.npz"
    command = workbench.command("head_importance", root)
    if path.exists():
        found = MapSet.load(path, written_by=command)
        if found.step == maps.step:
            numbers = {**maps.numbers, **found.numbers_at(maps.layers)}
            return dataclasses.replace(maps, numbers=numbers)
    return dataclasses.replace(maps, missing=(("importance", command),))


def _snapshots(folder: Path) -> list[MapSet]:
    """Loads the saved moments of a training, with the numbers `aligned` alone."""
    moments = []
    for step in steps_of(folder):
        maps = MapSet.load(folder / str(step) / "maps.npz")
        if maps.step is not None:
            known = maps.numbers.items()
            known = {x: y for x, y in known if x not in attention.STATISTICS}
            name = f"step {maps.step}"
            moments.append(dataclasses.replace(maps, name=name, numbers=known))
    return moments


def _run_of(folder: Path) -> Path | None:
    """Finds the folder of the run in which a folder lies, or None."""
    parents = folder.resolve().parents[:3]
    near = (each for each in parents if folders.Folder(each).config.exists())
    return next(near, None)
