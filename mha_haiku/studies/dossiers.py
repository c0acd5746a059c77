"""Joins what lies in a run's folder to the dossier of a page: maps, numbers, roles.

Beside the maps these are statistics, importance where it was measured, snapshots of the
training, and another run to compare with. Nothing is run, but for the matching of heads
with those of another run.

N examples, L layers, H heads, T positions.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mha_haiku import attention, checks, heads, models, report
from mha_haiku.checks import ConfigError
from mha_haiku.heads import alignment
from mha_haiku.heads import means as averages
from mha_haiku.report import dossier
from mha_haiku.report.maps import Maps
from mha_haiku.runs import folders

_MATCHED_EXAMPLES = 16
_HEAD = re.compile(r"head (\d+)")


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
    saved = report.maps.load(folder / "maps.npz")
    notes = ["The exact numbers are in maps.npz beside this page."]
    root = _run_of(folder)
    own = _set(folder, saved, root)
    if compare is None:
        moments = _snapshots(folder / "snapshots")
        if moments and own.step is not None:
            # The last of the training may be a snapshot as well.
            moments = [each for each in moments if each.step != own.step]
            own = own._replace(name=f"step {own.step}")
            moments = sorted([*moments, own], key=lambda each: each.step)
            return dossier.Dossier(saved.title, tuple(moments), notes=tuple(notes))
        return dossier.Dossier(
            saved.title, (own._replace(step=None),), notes=tuple(notes)
        )
    other_root, other_path = checks.as_path(compare), compared(compare)
    other_saved = report.maps.load(other_path)
    other = _set(other_path.parent, other_saved, other_root)
    matches = None
    if root is not None and _same_inputs(root, other_root):
        matches = _matches(root, other_root, saved, other_saved)
    else:
        notes.append("The two runs have different inputs: no heads are matched.")
    return dossier.Dossier(
        f"{own.name} and {other.name}",
        (own._replace(step=None), other._replace(step=None)),
        matches,
        tuple(notes),
    )


def of_arrays(
    arrays: Mapping[str, np.ndarray], statistics: Mapping[str, np.ndarray]
) -> dossier.MapSet:
    """Returns the set of maps and statistics that `attention_dump.measured` gives."""
    saved = report.maps.checked(arrays, "maps")
    numbers = _read(_with_names(statistics), _layout(saved), "statistics")
    return dossier.of_maps(saved, numbers=numbers, roles=roles(saved))


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


def roles(saved: Maps) -> dossier.Roles | None:
    """Returns what heads do in the saved examples, as `heads.roles` defines it.

    Of pooled maps the roles are not known, which gives None.
    """
    if saved.pooled:
        return None
    shape = len(saved.weights), max(map(len, saved.head_names))
    names = np.full(shape, "", dtype=object)
    scores = np.full(shape, np.nan)
    for i, own in enumerate(saved.head_names):
        means = _scores(saved, i)
        for h in range(len(own)):
            of_head = {name: float(values[h]) for name, values in means.items()}
            names[i, h], scores[i, h] = heads.role_of(of_head)
    return dossier.Roles(names, scores)


def _scores(saved: Maps, layer: int) -> dict[str, np.ndarray]:
    """Returns the scores of a layer's heads, `[H]`, over the saved examples."""
    examples = [_of_example(saved, layer, n) for n in range(saved.num_examples)]
    offsets = sum(each.pop("offsets") for each in examples)
    means = {
        name: averages.mean([each[name] for each in examples]) for name in examples[0]
    }
    if "repeated" in means:
        means["induction_of_repeated"] /= np.maximum(means.pop("repeated"), 1e-9)
    if "monotonic" in means:  # downwards too, as long as all examples do
        means["monotonic"] = np.abs(means["monotonic"])
    return means | {"positional": offsets.max(-1) / np.maximum(offsets.sum(-1), 1)}


def _of_example(saved: Maps, layer: int, example: int) -> dict[str, np.ndarray]:
    """Returns scores `[H]`, NaN where no row sees, and counts of `offsets`."""
    lengths = num_rows, num_columns = saved.shown_lengths(example, layer)
    part = np.s_[..., :num_rows, :num_columns]
    *_, most_rows, most_columns = saved.weights[layer].shape
    weights = saved.weights[layer][example][part].astype(np.float64)
    masked = np.zeros((1, *lengths), bool)
    if saved.masked is not None:
        masked = saved.masked[layer][example][part].reshape(-1, *lengths)
    sees = weights.sum(-1) > 0
    count = np.where(sees.any(-1), sees.sum(-1), np.nan)

    def mean(of_rows):
        return np.where(sees, of_rows, 0).sum(-1) / count

    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    most = np.log(np.maximum((~masked).sum(-1), 1))
    places = weights.argmax(-1)
    offsets = np.arange(num_rows) - places + most_columns - 1
    bins = most_rows + most_columns - 1
    counts = [
        np.bincount(each[rows], minlength=bins)
        for each, rows in zip(offsets, sees, strict=True)
    ]
    found = {
        "first_token": mean(weights[..., 0]),
        "relative_entropy": mean(entropy) / np.maximum(mean(most), 1e-9),
        "offsets": np.reshape(counts, (len(weights), bins)),
    }
    if saved.kinds[layer] == "cross":
        pairs = zip(places, sees, strict=True)
        found["monotonic"] = np.array([_correlation(*each) for each in pairs])
        if saved.alignment is not None:
            aligned = alignment.scores(
                weights[None], saved.alignment[example][part][None]
            )
            found["aligned"] = np.where(sees.any(-1), aligned[0], np.nan)
        return found
    side, _ = saved.sides[saved.kinds[layer]]
    tokens = side.tokens[example, :num_rows]
    if saved.images is not None:  # whose texts are classes and not what is read
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


def _set(folder: Path, saved: Maps, root: Path | None) -> dossier.MapSet:
    layout = _layout(saved)
    numbers, missing = _statistics(folder, layout), []
    if layout is not None and root is not None:
        path = folders.Folder(root).heads / "head_importance.npz"
        arrays = report.maps.arrays_of(path) if path.exists() else {}
        if int(arrays.get("step", -1)) == saved.step:
            numbers |= _read(arrays, layout, path)
        else:
            missing.append(("importance", _command("head_importance", root)))
    shown = {"step": saved.step, "numbers": numbers, "roles": roles(saved)}
    return dossier.of_maps(saved, **shown)._replace(missing=tuple(missing))


def _layout(saved: Maps):
    """Returns the numbers of layers, and of the heads of each; None: not a run's."""
    found = [[_HEAD.fullmatch(name) for name in own] for own in saved.head_names]
    if not all(all(own) for own in found):
        return None
    return saved.layers, [[int(each[1]) for each in own] for own in found]


def _with_names(arrays):
    """Returns the arrays of statistics.npz as those of `report.heads.to_arrays`."""
    if "heads" in arrays or "head_names" not in arrays:
        return arrays
    names = [int(name.removeprefix("head ")) for name in arrays["head_names"].tolist()]
    return {**arrays, "heads": np.tile(names, (len(arrays["layers"]), 1))}


def _read(arrays, layout, path):
    layers, names = layout
    try:
        return report.heads.of_arrays(arrays, layers=layers, heads=names)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{path} is not what a run writes: {error}.") from None


def _snapshots(folder: Path) -> list[dossier.MapSet]:
    """Returns the saved moments of a training, of whose numbers only `aligned`."""
    sets = []
    for path in folder.glob("*/maps.npz"):
        saved = report.maps.load(path)
        if saved.step is not None and path.parent.name.isdigit():
            shown = {"name": f"step {saved.step}", "roles": roles(saved)}
            numbers = {}
            if saved.alignment is not None:
                numbers = _statistics(path.parent, _layout(saved))
            numbers = {
                x: y for x, y in numbers.items() if x not in attention.STATISTICS
            }
            shown |= {"step": saved.step, "numbers": numbers}
            sets.append(dossier.of_maps(saved, **shown))
    return sets


def _statistics(folder: Path, layout) -> dict[str, report.heads.PerHead]:
    """Returns the saved statistics of heads; none where there are none."""
    path = folder / "statistics.npz"
    if layout is None or not path.exists():
        return {}
    return _read(_with_names(report.maps.arrays_of(path)), layout, path)


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


def _matches(first: Path, second: Path, saved: Maps, other: Maps) -> np.ndarray:
    """Returns for each saved head its counterpart in the other run; see `Dossier`."""
    runs = [folders.load_run(root).looped() for root in (first, second)]
    count = max(1, min(_MATCHED_EXAMPLES, 2**12 // runs[0].task.sequence_length))
    matching = heads.match(
        *((run.model, run.params) for run in runs), [runs[0].examples(count)]
    )
    shape = len(saved.weights), max(map(len, saved.head_names))
    matches = np.full((*shape, 2), -1)
    places = [
        _places(each, run) for each, run in zip((saved, other), runs, strict=True)
    ]
    for one, another in zip(matching.first, matching.second, strict=True):
        mine, its = places[0].get(tuple(one)), places[1].get(tuple(another))
        if mine is not None and its is not None:
            matches[mine] = its
    return matches


def _places(saved: Maps, run: folders.Run) -> dict:
    """Returns where a head of the model (layer, place) stands among the saved ones."""
    layers = models.heads_of_layers(run.config.model)
    return {
        (layer, layers[layer].names.index(int(_HEAD.fullmatch(name)[1]))): (i, h)
        for i, layer in enumerate(saved.layers)
        for h, name in enumerate(saved.head_names[i])
    }


def _command(script: str, root: Path) -> str:
    if root.is_relative_to(Path.cwd()):
        root = root.relative_to(Path.cwd())
    return f"python -m experiments.{script} --workdir={root}"
