"""What `mh.show` and `mh.plot` give of subjects, their answers, runs and their files.

L layers, H heads of a layer, T positions.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.showing import answers, curves, drawing, markup, plotting, sets, shown
from mha_haiku.showing.answers import Grid, visible
from mha_haiku.showing.map_set import Dossier, MapSet
from mha_haiku.subjects.answers import Circuits, Lens, Strongest, TextMaps
from mha_haiku.subjects.studies import (
    attention_dump,
    dossiers,
    head_statistics,
    pruning,
)
from mha_haiku.subjects.studies import timeline as timelines
from mha_haiku.subjects.studies.workbench import Bench
from mha_haiku.subjects.subject import Subject
from mha_haiku.training.runs import files, folders, metrics_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PROGRAMS = 32
_PROGRAMS: dict[Any, Any] = {}  # so that a run that is shown again compiles nothing


# --- Maps of runs and of subjects


@sets.maps_of.register
def _(answer: TextMaps) -> sets.Given:
    texts = {"tokens": answer.tokens, "key_tokens": answer.key_tokens}
    texts = {name: each for name, each in texts.items() if each}
    return sets.Given(answer.maps, texts, answer.why)


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
    bench = Bench(
        run._replace(config=config),
        folders.Folder(Path(name)),
        lambda iterable, **_: iterable,
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
        return dossiers.of_folder(path, compare=other)
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
        parts.append(shown.of_parameters(subject.params))
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
    parts = markup.plain_table(rows), shown.of_parameters(run.params)
    note = "mh.show of it shows its maps on held-out examples."
    return markup.block(title, *parts, note=note)


@shown.fragment.register
def _(statistics: head_statistics.HeadStatistics) -> markup.Html:
    return markup.block(statistics.title, markup.preformatted(statistics.text()))


@shown.fragment.register
def _(strongest: Strongest) -> markup.Html:
    return markup.block(
        f"Layer {strongest.layer}, head {strongest.head}: largest {strongest.by}",
        answers.rows_table(strongest.rows(), digits=3),
        note="Positions count from 0; the text ends at the query.",
    )


# --- As a figure


@plotting.figure_of.register(Strongest)
def _(what: Strongest, *, title: str | None) -> "Figure":
    labels = []
    for row in what.rows():
        ends = [
            f"{visible(row[f'{end} token'])} ({row[end]})" if what.tokens else row[end]
            for end in ("query", "key")
        ]
        labels.append(f"example {row['example']}: {ends[0]} to {ends[1]}")
    title = title or f"Layer {what.layer}, head {what.head}: strongest examples"
    sheet = drawing.sheet(5.5, max(1.8, 0.25 * len(labels) + 1.2), title=title)
    axes = sheet.subplots()
    axes.barh(range(len(labels)), what.values)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    units = {"weight": "largest weight of the query", "size": "norm of the output"}
    axes.set_xlabel(units[what.by])
    return sheet


@plotting.figure_of.register(str)
@plotting.figure_of.register(os.PathLike)
def _(what: Any, *, title: str | None) -> "Figure":
    path = checks.as_path(what)
    files_of_a_run = ["metrics.jsonl", "timeline.jsonl", "pruning.csv", "maps.npz"]
    name = checks.choice("what", path.name, files_of_a_run)
    if name == "pruning.csv":
        curve = pruning.read_curve(path)
        return curves.pruning(**curve, title=title or "Heads kept")
    if name == "timeline.jsonl":
        if not files.read_lines(path):
            raise checks.ConfigError(f"{path} has no lines.")
        return plotting.drawn(timelines.picture(path), title)
    reports = metrics_log.read(path)
    if not reports:
        raise checks.ConfigError(f"{path} has no reports.")
    title = title or f"Loss and accuracy of {path.resolve().parent.name}"
    return curves.learning(reports, title=title)


# --- Numbers in rows and columns


def _of_circuits(circuits: Circuits) -> Grid:
    known = ~np.isnan(circuits.scores)
    senders, receivers = (
        np.argwhere(known.any(others)).tolist() for others in ((2, 3), (0, 1))
    )
    if not senders:
        raise ValueError("there are no two layers of which one reads the other.")
    values = np.array([[circuits.scores[*a, *b] for b in receivers] for a in senders])
    names = [[f"{layer}.{head}" for layer, head in x] for x in (senders, receivers)]
    kind = circuits.kind.upper()
    return Grid(
        values,
        *names,
        "composition",
        title=f"{kind}-composition",
        caption=f"{kind}-composition of heads, from weights alone",
        note="Rows write, columns read; layer and head. Random weights are not at 0.",
    )


def _of_lens(lens: Lens) -> Grid:
    return Grid(
        lens.probabilities,
        lens.names,
        [visible(x) for x in lens.tokens],
        "probability",
        title="Logit lens",
        caption="Logit lens: the likeliest next token after each layer",
        note="The colour is the probability. Columns are the tokens that are read.",
        texts=np.vectorize(visible, otypes=[str])(lens.texts),
    )


answers.shows(Circuits, _of_circuits)
answers.shows(Lens, _of_lens)
