"""What `mh.show` and `mh.plot` give of subjects, runs and their files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from mha_haiku.core import checks
from mha_haiku.showing import markup, plotting, sets, shown
from mha_haiku.showing.map_set import Dossier, MapSet
from mha_haiku.subjects.studies import (
    attention_dump,
    dossiers,
    head_statistics,
    observers,
    pruning,
    workbench,
)
from mha_haiku.subjects.subject import Subject
from mha_haiku.training.runs import folders

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PROGRAMS = 32
_PROGRAMS: dict[Any, Any] = {}  # so that a run that is shown again compiles nothing


# --- Maps of runs and of subjects


@sets.map_set_of.register
def _(run: folders.Run) -> MapSet:
    return _measured(run, run.task.name)


@sets.map_set_of.register
def _(subject: Subject) -> MapSet:
    if subject.run is None:
        raise ValueError(f"{subject.name} has no task: show its maps of inputs.")
    return _measured(subject.run._replace(params=subject.params), subject.name)


def _measured(run, name) -> MapSet:
    """Collects maps, and numbers of heads, over held-out examples."""
    config = run.config.replace(attention=dict(dtype="float32"))
    if len(_PROGRAMS) > _MOST_PROGRAMS:
        _PROGRAMS.clear()
    bench = workbench.Bench(
        run._replace(config=config),
        folders.Folder(Path(name)),
        workbench.silent,
        _PROGRAMS,
    )
    return attention_dump.measured(
        bench,
        means=False,
        weights=run.task.sequence_length <= sets.WHOLE,
        channels=True,
        devices=jax.local_devices()[:1],
    )


@sets.map_set_of.register(str)
@sets.map_set_of.register(os.PathLike)
def _(path: Any) -> MapSet:
    return sets.map_set_of(folders.load_run(path))


@sets.dossier_of.register(str)
@sets.dossier_of.register(os.PathLike)
def _(path: Any, compare: Any = None) -> Dossier:
    """Collects all that lies in a folder where its maps were saved."""
    other = sets.named(compare)[1]
    if _has_saved_maps(path) and (other is None or _has_saved_maps(other)):
        return dossiers.of_maps(checks.as_path(path) / "attention", compare=other)
    return sets.joined(path, compare)


def _has_saved_maps(value) -> bool:
    is_path = isinstance(value, str | os.PathLike)
    return is_path and (checks.as_path(value) / "attention" / "maps.npz").exists()


# --- In a notebook, by itself


@shown.fragment.register
def _(run: folders.Run) -> markup.Html:
    return _of_run(f"Run of {run.config.task.name}, step {run.step:,}", run)


@shown.fragment.register
def _(subject: Subject) -> markup.Html:
    if subject.run is not None:
        return _of_run(subject.name, subject.run._replace(params=subject.params))
    count = sum(x.size for x in jax.tree.leaves(subject.params))
    rows = [("model", subject.model.description), ("parameters", f"{count:,}")]
    parts = [markup.plain_table(rows)]
    if subject.model.config is not None:
        parts.append(shown.of_parameters(subject.params, subject.model.config))
    return markup.block(
        subject.name, *parts, note="subject.show(text) shows its maps of a text."
    )


def _of_run(title, run) -> markup.Html:
    """Describes a run, with its parameters by layer and head."""
    config = run.config
    rows = [
        ("task", f"{config.task.name}, {run.task.sequence_length} positions"),
        ("model", run.model.description),
        ("step", f"{run.step:,} of {config.training.steps:,}"),
        ("precision", config.model.precision),
    ]
    parts = markup.plain_table(rows), shown.of_parameters(run.params, config.model)
    note = "mh.show of it shows its maps on held-out examples."
    return markup.block(title, *parts, note=note)


@shown.fragment.register
def _(statistics: head_statistics.HeadStatistics) -> markup.Html:
    return markup.block(statistics.title, markup.preformatted(statistics.text()))


# --- As a figure


@plotting.figure_of.register(str)
@plotting.figure_of.register(os.PathLike)
def _(what: Any, *, title: str | None) -> "Figure":
    path = checks.as_path(what)
    name = checks.choice("what", path.name, [*_FILES, "maps.npz"])
    picture = _FILES[name](path)
    if picture is None:
        raise checks.ConfigError(f"{path} has no lines.")
    return plotting.drawn(picture, title)


# The pictures of what a run has written, but for its maps.
_FILES = {
    "metrics.jsonl": observers.learning_curve,
    "timeline.jsonl": observers.timeline,
    "pruning.csv": pruning.picture,
}
