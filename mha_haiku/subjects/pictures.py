"""`mh.show` and `mh.plot` for subjects, runs and their files."""

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import jax

from mha_haiku.core import checks, models
from mha_haiku.records.map_set import Dossier, MapSet
from mha_haiku.showing import markup, plotting, sets, shown
from mha_haiku.subjects import computing, dossiers, observers
from mha_haiku.subjects.subject import Subject, has_task
from mha_haiku.subjects.verbs import dumping, prune_sweep
from mha_haiku.training.runs import folders

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- Maps of runs and of subjects


@sets.map_set_of.register
def _(run: folders.Run) -> MapSet:
    subject = Subject.of_run(run, run.task.name)
    return sets.map_set_of(subject.replace(cache=_programs(run.model)))


@functools.lru_cache(maxsize=32)
def _programs(model: models.Model) -> dict:
    """Returns a cache, so that a run which is shown again does not compile again."""
    return {}


@sets.map_set_of.register
def _(subject: Subject) -> MapSet:
    """Collects maps, and numbers of heads, over held-out examples."""
    if not has_task(subject):
        raise ValueError(f"{subject.name} has no task: show its maps of inputs.")
    config = subject.config.replace(attention=dict(dtype="float32"))
    return dumping.measured(
        subject.replace(config=config, progress=computing.silent),
        means=False,
        weights=subject.task.sequence_length <= sets.WHOLE,
        devices=jax.local_devices()[:1],
    )


@sets.map_set_of.register(str | os.PathLike)
def _(path: Any) -> MapSet:
    return sets.map_set_of(folders.load_run(path))


@sets.dossier_of.register(str | os.PathLike)
def _(path: Any, compare: Any = None) -> Dossier:
    """Collects the maps and snapshots that were saved in a folder."""
    folder = folders.Folder(checks.as_path(path)).attention
    if not (folder / "maps.npz").exists():
        return sets.joined(path, compare)
    whole = dossiers.of_folder(folder)
    if compare is None:
        return whole
    return sets.joined(dataclasses.replace(whole.sets[-1], name=whole.title), compare)


# --- In a notebook, by itself


@shown.fragment.register
def _(run: folders.Run) -> markup.Html:
    title = f"Run of {run.config.task.name}, step {run.step:,}"
    return shown.fragment(Subject.of_run(run, title))


@shown.fragment.register
def _(subject: Subject) -> markup.Html:
    """Describes a subject, with the sizes of its parameters by module."""
    model, params = subject.model, subject.params
    rows, note = [("model", model.description)], "subject.show(text) shows its maps."
    if not has_task(subject):
        count = sum(x.size for x in jax.tree.leaves(params))
        rows.append(("parameters", f"{count:,}"))
    else:
        config = subject.config
        task = f"{config.task.name}, {subject.task.sequence_length} positions"
        step = f"{subject.step:,} of {config.training.steps:,}"
        rows = [("task", task), *rows, ("step", step)]
        rows.append(("precision", config.model.precision))
        note = "mh.show of it shows its maps on held-out examples."
    parts = [markup.plain_table(rows)]
    if model.config is not None:
        parts.append(shown.of_parameters(params))
    return markup.block(subject.name, *parts, note=note)


# --- As a figure


@plotting.figure_of.register(str | os.PathLike)
def _(what: Any, *, title: str | None) -> "Figure":
    path = checks.as_path(what)
    name = checks.choice("what", path.name, [*_FILES, "maps.npz"])
    picture = _FILES[name](path)
    if picture is None:
        raise checks.ConfigError(f"{path} has no lines.")
    return plotting.drawn(picture, title)


# The pictures of the files of a run, except its maps.
_FILES = {
    "metrics.jsonl": observers.learning_curve,
    "timeline.jsonl": observers.timeline,
    "pruning.csv": prune_sweep.picture,
}
