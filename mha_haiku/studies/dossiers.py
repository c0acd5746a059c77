"""Joins what lies in a run's folder to the dossier of a page: maps, numbers, roles.

Beside the maps these are statistics, importance where it was measured, snapshots of the
training, and another run to compare with. Nothing is run, but for the matching of heads
with those of another run.

N examples, L layers, H heads, T positions.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np

from mha_haiku import attention, checks, heads, models
from mha_haiku.checks import ConfigError
from mha_haiku.heads import alignment
from mha_haiku.heads import means as averages
from mha_haiku.report import dossier
from mha_haiku.report.map_set import Example, Layer, MapSet, Roles
from mha_haiku.runs import folders

_MATCHED_EXAMPLES = 16
_UNSEEN = np.iinfo(np.int64).max  # the offset of a row that sees nothing


def of_folder(
    workdir: str | os.PathLike,
    *,
    compare: str | os.PathLike | None = None,
    step: int | None = None,
) -> dossier.Dossier:
    """Returns all that the folder of a run with saved maps has of its heads.

    That may be together with another run, or of the snapshot of one step alone.

    Raises:
      ConfigError: If maps or the snapshot are missing, or a file is not what a run
        writes.
    """
    root = checks.as_path(workdir)
    folder = folders.Folder(root).attention
    if step is not None:
        with checks.user_mistakes():
            checks.non_negative_integer("step", step)
        steps = steps_of(folders.Folder(root))
        if step not in steps:
            have = "none" if not steps else f"those of {', '.join(map(str, steps))}"
            raise ConfigError(
                f"There is no snapshot of step {step} in {folder / 'snapshots'}; it "
                f"has {have}."
            )
        return of_maps(folder / "snapshots" / str(step), compare=compare)
    if not (folder / "maps.npz").exists():
        raise ConfigError(
            f"There are no maps in {folder}.\n{_command('dump_attention', root)}"
        )
    return of_maps(folder, compare=compare)


def of_maps(
    folder: str | os.PathLike, *, compare: str | os.PathLike | None = None
) -> dossier.Dossier:
    """Returns a dossier of the `maps.npz` of a folder.

    That may be a run's attention, one inside of it, or any. Heads of another run to
    `compare` are matched with those of the run in which the maps are. Errors are those
    of `of_folder`.
    """
    folder = checks.as_path(folder)
    own = MapSet.load(folder / "maps.npz")
    title = own.name
    notes = ["The exact numbers are in maps.npz beside this page."]
    root = _run_of(folder)
    own = _with_importance(own, root)
    if compare is None:
        moments = _snapshots(folder / "snapshots")
        if moments and own.step is not None:
            # The last of the training may be a snapshot as well.
            moments = [each for each in moments if each.step != own.step]
            own = dataclasses.replace(own, name=f"step {own.step}")
            moments = sorted([*moments, own], key=lambda each: each.step)
            return dossier.Dossier(title, tuple(moments), notes=tuple(notes))
        own = dataclasses.replace(own, step=None)
        return dossier.Dossier(title, (own,), notes=tuple(notes))
    other_root = checks.as_path(compare)
    other = _with_importance(MapSet.load(compared(compare)), other_root)
    matches = None
    if root is not None and _same_inputs(root, other_root):
        matches = _matches(root, other_root, own, other)
    else:
        notes.append("The two runs have different inputs: no heads are matched.")
    return dossier.Dossier(
        f"{own.name} and {other.name}",
        tuple(dataclasses.replace(each, step=None) for each in (own, other)),
        matches,
        tuple(notes),
    )


def steps_of(folder: folders.Folder) -> list[int]:
    """Returns the steps of the snapshots in a run's folder, in order."""
    paths = folder.snapshots.glob("*/maps.npz")
    return sorted(int(path.parent.name) for path in paths if path.parent.name.isdigit())


def compared(workdir: str | os.PathLike) -> Path:
    """Returns the saved maps of a run that another is compared with.

    Raises:
      ConfigError: If it has none.
    """
    root = checks.as_path(workdir)
    path = folders.Folder(root).attention / "maps.npz"
    if not path.exists():
        raise ConfigError(
            f"compare must be a run with saved maps, and {path.parent} has none.\n"
            f"{_command('dump_attention', root)}"
        )
    return path


def roles(maps: MapSet) -> Roles | None:
    """Returns what heads do in the examples of a set, as `heads.roles` defines it.

    Of pooled maps the roles are not known, which gives None.
    """
    if maps.is_pooled:
        return None
    names, values = np.full(maps.shape, "", object), np.full(maps.shape, np.nan)
    for i, layer in enumerate(maps.layers):
        means = _scores(maps, i)
        for h in range(len(layer.heads)):
            of_head = {name: float(x[h]) for name, x in means.items()}
            names[i, h], values[i, h] = heads.role_of(of_head)
    return Roles(names, values)


def _scores(maps: MapSet, layer: int) -> dict[str, np.ndarray]:
    """Returns the scores of a layer's heads, `[H]`, over the examples."""
    examples = [_of_example(maps.layers[layer], layer, each) for each in maps.inputs]
    offsets = np.concatenate([each.pop("offsets") for each in examples], -1)
    counts = [np.unique(x[x != _UNSEEN], return_counts=True)[1] for x in offsets]
    means = {
        name: averages.mean([each[name] for each in examples]) for name in examples[0]
    }
    if "repeated" in means:
        means["induction_of_repeated"] /= np.maximum(means.pop("repeated"), 1e-9)
    if "monotonic" in means:  # downwards too, as long as all examples do
        means["monotonic"] = np.abs(means["monotonic"])
    most = [x.max(initial=0) / max(x.sum(), 1) for x in counts]
    return means | {"positional": np.array(most)}


def _of_example(layer: Layer, place: int, example: Example) -> dict[str, np.ndarray]:
    """Returns scores `[H]`, NaN where no row sees, and `offsets` `[H, T]` of rows."""
    axes, weights = example.axes(layer), example.weights[place].astype(np.float64)
    _, num_rows, num_columns = weights.shape
    masked = example.masked_cells(place)
    if masked is None:
        masked = np.zeros((num_rows, num_columns), bool)
    sees = weights.sum(-1) > 0
    count = np.where(sees.any(-1), sees.sum(-1), np.nan)

    def mean(of_rows):
        return np.where(sees, of_rows, 0).sum(-1) / count

    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    most = np.log(np.maximum((~masked).sum(-1), 1))
    places = weights.argmax(-1)
    found = {
        "first_token": mean(weights[..., 0]),
        "relative_entropy": mean(entropy) / np.maximum(mean(most), 1e-9),
        "offsets": np.where(sees, np.arange(num_rows) - places, _UNSEEN),
    }
    if layer.kind == "cross":
        pairs = zip(places, sees, strict=True)
        found["monotonic"] = np.array([_correlation(*each) for each in pairs])
        if axes.alignment is not None:
            aligned = alignment.scores(weights[None], axes.alignment[None])
            found["aligned"] = np.where(sees.any(-1), aligned[0], np.nan)
        return found
    tokens = np.array(axes.queries.tokens)
    if example.images is not None:  # whose texts are classes and not what is read
        tokens = np.arange(num_rows)
    # What followed the same token before: key s of query t if token s - 1 is token t.
    before = np.tril(tokens[:, None] == tokens[None, :], -1)
    follows = np.pad(before[:, :-1], ((0, 0), (1, 0)))
    return found | {
        "previous_token": np.trace(weights, -1, -2, -1) / count,
        "next_token": np.trace(weights, 1, -2, -1) / count,
        "own_position": np.trace(weights, 0, -2, -1) / count,
        "induction_of_repeated": (weights * follows).sum((-1, -2)) / count,
        "repeated": mean(before.any(1)),
    }


def _correlation(places: np.ndarray, sees: np.ndarray) -> float:
    """Returns that of the rows that see and the places of their largest weights."""
    rows, places = np.flatnonzero(sees), places[sees]
    if not len(rows):
        return np.nan
    is_flat = len(rows) < 2 or (places == places[0]).all()
    return 0.0 if is_flat else np.corrcoef(rows, places)[0, 1]


def _with_importance(maps: MapSet, root: Path | None) -> MapSet:
    """Returns the set with the importance of its heads, where it was measured."""
    if root is None or any(layer.index is None for layer in maps.layers):
        return maps
    path = folders.Folder(root).heads / "head_importance.npz"
    command = _command("head_importance", root)
    if path.exists():
        found = MapSet.load(path, written_by=command)
        if found.step == maps.step:
            numbers = {**maps.numbers, **found.numbers_at(maps.layers)}
            return dataclasses.replace(maps, numbers=numbers)
    return dataclasses.replace(maps, missing=(("importance", command),))


def _snapshots(folder: Path) -> list[MapSet]:
    """Returns the saved moments of a training, of whose numbers only `aligned`."""
    moments = []
    for path in folder.glob("*/maps.npz"):
        maps = MapSet.load(path)
        if maps.step is not None and path.parent.name.isdigit():
            known = maps.numbers.items()
            known = {x: y for x, y in known if x not in attention.STATISTICS}
            name = f"step {maps.step}"
            moments.append(dataclasses.replace(maps, name=name, numbers=known))
    return moments


def _run_of(folder: Path) -> Path | None:
    """Returns the folder of the run in which a folder lies, or None."""
    parents = folder.resolve().parents[:3]
    near = (each for each in parents if folders.Folder(each).config.exists())
    return next(near, None)


def _same_inputs(first: Path, second: Path) -> bool:
    configs = [folders.read_config(folders.Folder(root)) for root in (first, second)]
    if None in configs:
        return False
    return all(
        configs[0].get(name) == configs[1].get(name) for name in ("task", "data")
    )


def _matches(first: Path, second: Path, maps: MapSet, other: MapSet) -> np.ndarray:
    """Returns for each head its counterpart in the other run; see `Dossier`."""
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
    """Returns where a head of the model (layer, place) stands in the set."""
    layers = models.heads_of_layers(run.config.model)
    return {
        (layer.index, layers[layer.index].names.index(int(name))): (i, h)
        for i, layer in enumerate(maps.layers)
        for h, name in enumerate(layer.heads)
    }


def _command(script: str, root: Path) -> str:
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    return f"python -m experiments.{script} --workdir={root}"
