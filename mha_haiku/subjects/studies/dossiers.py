"""Joins what lies in a run's folder to the dossier of a page: maps, numbers, roles.

These are statistics, importance where it was measured, snapshots of the training, and
another run to compare with. Nothing is run, but to match heads with another run's.

N examples, L layers, H heads, T positions.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np

from mha_haiku.core import attention, checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.showing import map_set, sets
from mha_haiku.showing.map_set import MapSet
from mha_haiku.subjects.studies import workbench
from mha_haiku.training.runs import folders

_MATCHED_EXAMPLES = 16


def of_maps(
    folder: str | os.PathLike, *, compare: str | os.PathLike | None = None
) -> map_set.Dossier:
    """Makes a dossier of the `maps.npz` of a folder.

    Heads of another run to `compare` are matched with the heads of the maps' run.
    """
    folder = checks.as_path(folder)
    root = _run_of(folder)
    own = _with_importance(MapSet.load(folder / "maps.npz"), root)
    notes = ("The exact numbers are in maps.npz next to this page.",)
    if compare is not None:
        other_root = checks.as_path(compare)
        other = _with_importance(MapSet.load(compared(compare)), other_root)
        both = sets.joined(own, other)
        if root is None or not _same_inputs(root, other_root):
            notes += ("The two runs have different inputs: no heads are matched.",)
            return both._replace(notes=notes)
        matches = _matches(root, other_root, own, other)
        return both._replace(matches=matches, notes=notes)
    moments = _snapshots(folder / "snapshots")
    if not moments or own.step is None:
        shown = (dataclasses.replace(own, step=None),)
        return map_set.Dossier(own.name, shown, notes=notes)
    # The last of the training may be a snapshot as well.
    moments = [each for each in moments if each.step != own.step]
    moments.append(dataclasses.replace(own, name=f"step {own.step}"))
    moments.sort(key=lambda each: each.step)
    return map_set.Dossier(own.name, tuple(moments), notes=notes)


def steps_of(snapshots: Path) -> list[int]:
    """Lists the steps of the snapshots in a folder of these, in order."""
    paths = snapshots.glob("*/maps.npz")
    return sorted(int(path.parent.name) for path in paths if path.parent.name.isdigit())


def compared(workdir: str | os.PathLike) -> Path:
    """Finds the saved maps of a run that another run is compared with."""
    root = checks.as_path(workdir)
    path = folders.Folder(root).attention / "maps.npz"
    if not path.exists():
        raise ConfigError(
            f"compare must be a run with saved maps, and {path.parent} has none.\n"
            f"{workbench.command('dump_attention', root)}"
        )
    return path


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


def _same_inputs(*roots: Path) -> bool:
    one, other = (folders.read_config(folders.Folder(root)) for root in roots)
    return bool(one and other) and (one.task, one.data) == (other.task, other.data)


def _matches(first: Path, second: Path, maps: MapSet, other: MapSet) -> np.ndarray:
    """Finds for each head its counterpart in the other run; see `Dossier`."""
    runs = [folders.load_run(root).looped() for root in (first, second)]
    count = max(1, min(_MATCHED_EXAMPLES, 2**12 // runs[0].task.sequence_length))
    matching = heads.match(
        *((run.model, run.params) for run in runs), [runs[0].examples(count)]
    )
    matches = np.full((*maps.shape, 2), -1)
    places = [_places(each, run) for each, run in zip((maps, other), runs, strict=True)]
    for one, another in zip(matching.first, matching.second, strict=True):
        mine, its = places[0].get(tuple(one)), places[1].get(tuple(another))
        if mine is not None and its is not None:
            matches[mine] = its
    return matches


def _places(maps: MapSet, run: folders.Run) -> dict:
    """Maps the model's heads (layer, place) to their places in the set."""
    layers = models.heads_of_layers(run.config.model)
    return {
        (layer.index, layers[layer.index].names.index(int(name))): (i, h)
        for i, layer in enumerate(maps.layers)
        for h, name in enumerate(layer.heads)
    }
