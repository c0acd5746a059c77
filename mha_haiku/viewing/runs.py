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
    """Returns the page of a run or a `MapSet`, or of two; arguments as of `show`.

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
    other_name, compare = showing.named(compare)
    if _has_saved_maps(value) and (compare is None or _has_saved_maps(compare)):
        whole = dossiers.of_folder(value, compare=compare)
        if heads is not None:
            sets = tuple(_with_heads(each, heads) for each in whole.sets)
            whole = whole._replace(sets=sets, matches=None)
        return showing.of_dossier(whole, budget=budget)
    sets, names = [_maps("the run", value)], [""]
    if compare is not None:
        sets.append(_maps("compare", compare))
        names = showing.distinct(sets[0].name, other_name or sets[1].name)
    title = " and ".join(each.name for each in sets)
    if heads is not None:
        sets = [_with_heads(each, heads) for each in sets]
    pairs = zip(sets, names, strict=True)
    shown = (dataclasses.replace(x, name=name, step=None) for x, name in pairs)
    return showing.of_dossier(dossier.Dossier(title, tuple(shown)), budget=budget)


def _has_saved_maps(value) -> bool:
    is_path = isinstance(value, str | os.PathLike)
    return is_path and (checks.as_path(value) / "attention" / "maps.npz").exists()


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


def _maps(name, value) -> MapSet:
    """Returns a set of maps as it is, and of a run those of its held-out examples."""
    if isinstance(value, MapSet):
        return value
    if isinstance(value, str | os.PathLike):
        value = folders.load_run(value)
    if not isinstance(value, folders.Run):
        raise TypeError(
            f"{name} must be a run or its folder, got {type(value).__name__}."
        )
    run = value
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
    return attention_dump.measured(
        bench, means=False, weights=is_short, channels=True, devices=devices
    )
