"""Runs: a table of what one is, and the page of its maps.

L layers, N examples.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku import checks, models
from mha_haiku.report import dossier
from mha_haiku.report.map_set import MapSet
from mha_haiku.runs import folders
from mha_haiku.studies import attention_dump, dossiers
from mha_haiku.studies.workbench import Bench
from mha_haiku.viewing import collect, markup, showing, shown

_MOST_PROGRAMS = 32
_PROGRAMS: dict[Any, Any] = {}  # so that a run that is shown again compiles nothing


def fragment(run: folders.Run) -> markup.Html:
    """Returns what a run is, and its parameters by layer and head."""
    config, layers = run.config, models.heads_of_layers(run.config.model)
    rows = [
        ("task", f"{config.task.name}, {run.task.sequence_length} positions"),
        ("model", run.model.description),
        ("step", f"{run.step:,} of {config.training.steps:,}"),
        ("precision", config.model.precision),
    ]
    return markup.block(
        f"Run of {config.task.name}, step {run.step:,}",
        markup.plain_table(rows),
        shown.of_parameters(run.params, [layer.names for layer in layers]),
        note="mh.show(run) shows its maps on held-out examples.",
    )


def view(
    value: Any,
    *,
    budget: int,
    compare: Any = None,
    heads: Any = None,
    **given: Any,
) -> showing.View:
    """Returns the page of a run, or of two; arguments as of `show`.

    A run in memory is shown on held-out examples, a folder with all that lies in it
    where its maps were saved.

    Raises:
      ValueError: If another argument is given, or the runs do not fit one page.
      ConfigError: If there is no run in a folder.
    """
    for name, each in given.items():
        if each is not None:
            raise ValueError(
                f"{name} must be None for a run, which has examples of its own; "
                "show(run.maps(text), tokens=...) shows others."
            )
    other_name, compare = showing.compared(compare)
    if _has_saved_maps(value) and (compare is None or _has_saved_maps(compare)):
        whole = dossiers.of_folder(value, compare=compare)
        if heads is not None:
            sets = tuple(_with_heads(each, heads) for each in whole.sets)
            whole = whole._replace(sets=sets, matches=None)
        return showing.of_dossier(whole, budget=budget)
    runs = [_run("the run", value)]
    names = [""]
    if compare is not None:
        runs.append(_run("compare", compare))
        names = ["shown", other_name]
    sets = [_set(*each) for each in zip(runs, names, strict=True)]
    if heads is not None:
        sets = [_with_heads(each, heads) for each in sets]
    titles = [f"{run.config.task.name}, step {run.step:,}" for run in runs]
    whole = dossier.Dossier(" and ".join(titles), tuple(sets))
    return showing.of_dossier(whole, budget=budget)


def _has_saved_maps(value) -> bool:
    is_path = isinstance(value, str | os.PathLike)
    return is_path and (checks.as_path(value) / "attention" / "maps.npz").exists()


def _run(name, value) -> folders.Run:
    if isinstance(value, folders.Run):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{name} must be a run or its folder, got {type(value).__name__}."
        )
    return folders.load_run(value)


def _with_heads(maps: MapSet, heads) -> MapSet:
    """Returns the maps of some heads, by their names in the unpruned model."""
    if not np.ndim(heads) or not len(heads):
        raise ValueError(f"heads must be a list of heads, as [0, 2], got {heads!r}.")
    wanted = list(map(str, heads))
    known = {name for layer in maps.layers for name in layer.heads}
    for name in wanted:
        checks.choice("heads", name, sorted(known, key=int))
    places = [
        [layer.heads.index(name) for name in wanted if name in layer.heads]
        for layer in maps.layers
    ]
    return maps.with_heads(places)


def _set(run, name) -> MapSet:
    """Returns the maps of a run on its held-out examples."""
    config = run.config.copy_and_resolve_references()
    config.attention.dtype = "float32"
    if len(_PROGRAMS) > _MOST_PROGRAMS:
        _PROGRAMS.clear()
    bench = Bench(
        run._replace(config=config),
        folders.Folder(Path(run.task.name)),
        lambda iterable, **_: iterable,
        _PROGRAMS,
    )
    devices = jax.local_devices()[:1]
    is_short = run.task.sequence_length <= collect.WHOLE
    maps = attention_dump.measured(
        bench, means=False, weights=is_short, channels=True, devices=devices
    )
    return dataclasses.replace(maps, name=name)
