"""Runs: a table of what one is, and the page of its maps.

L layers, N examples.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mha_haiku import checks, models
from mha_haiku.report import dossier
from mha_haiku.runs import folders
from mha_haiku.studies import attention_dump, dossiers
from mha_haiku.studies.workbench import Bench
from mha_haiku.viewing import collect, markup, parameters, showing

_LIKELIEST = dossier.MOST_LIKELIEST


def fragment(run: folders.Run) -> markup.Html:
    """Returns what a run is, and its parameters by layer and head.

    Args:
      run: The run; its model does not run.
    """
    config = run.config
    rows = [
        ("task", f"{config.task.name}, {run.task.sequence_length} positions"),
        ("model", run.model.description),
        ("step", f"{run.step:,} of {config.training.steps:,}"),
        ("precision", config.model.precision),
    ]
    return markup.block(
        f"Run of {config.task.name}, step {run.step:,}",
        markup.plain_table(rows),
        parameters.fragment(run.params, _names(run)),
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
    """Returns the page of a run; arguments as of `show`.

    Args:
      value: A run in memory, which is shown on held-out examples, or the path of its
        folder, with all that lies in it where its maps were saved.
      budget: Bytes.
      compare: Another run, likewise.
      heads: Which heads of every layer.
      **given: Of other arguments, which must be None: a run has tokens of its own.

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
    other_name = "compared"
    if isinstance(compare, Mapping) and len(compare) == 1:
        ((other_name, compare),) = compare.items()
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
        names = ["shown", str(other_name)]
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


def _with_heads(maps: dossier.MapSet, heads) -> dossier.MapSet:
    """Returns the maps of some heads, by their names in the unpruned model.

    Raises:
      ValueError: If a layer has none of them at all and no other has.
    """
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
    width = max(map(len, places))

    def columns(values, missing):
        if values is None:
            return None
        kept = np.full((len(values), width, *values.shape[2:]), missing, values.dtype)
        for row, own, each in zip(kept, values, places, strict=True):
            row[: len(each)] = own[each]
        return kept

    numbers = {
        name: each._replace(
            mean=columns(each.mean, np.nan),
            standard_error=columns(each.standard_error, np.nan),
            ranks=columns(each.ranks, np.nan),
        )
        for name, each in maps.numbers.items()
    }
    roles = maps.roles and dossier.Roles(
        columns(maps.roles.names, ""), columns(maps.roles.scores, np.nan)
    )
    layers = tuple(
        layer._replace(heads=tuple(layer.heads[j] for j in each))
        for layer, each in zip(maps.layers, places, strict=True)
    )
    examples = tuple(_example_with(each, places) for each in maps.examples)
    return maps._replace(layers=layers, examples=examples, numbers=numbers, roles=roles)


def _example_with(example, places):
    masked = [example.masked_cells(i) for i in range(len(places))]
    masked = tuple(
        own[each] if own is not None and own.ndim == 3 else own
        for own, each in zip(masked, places, strict=True)
    )
    channels = example.channels and tuple(
        own and own._replace(query=own.query[each], key=own.key[each])
        for own, each in zip(example.channels, places, strict=True)
    )
    patches = tuple(
        each._replace(head=places[each.layer].index(each.head))
        for each in example.patches
        if each.head in places[each.layer]
    )
    return example._replace(
        weights=tuple(
            own[each] for own, each in zip(example.weights, places, strict=True)
        ),
        masked=masked,
        channels=channels,
        patches=patches,
    )


def _set(run, name) -> dossier.MapSet:
    """Returns the maps of a run on its held-out examples."""
    if run.task.target_length is not None:
        folder = folders.Folder(Path(run.task.name))
        bench = Bench(run, folder, progress=lambda iterable, **_: iterable)
        arrays, statistics = attention_dump.measured(bench, means=False)
        return dossiers.of_arrays(arrays, statistics, name)
    run = run.looped()
    example = run.examples(run.config.attention.examples)
    output = run.model.apply(
        run.params, None, example.inputs, lengths=example.lengths, is_training=False
    )
    count = len(example.inputs)
    rows = [jax.tree.map(lambda x, i=i: x[i], example) for i in range(count)]
    tokens = tuple(tuple(run.task.labels(row)) for row in rows)
    lengths = [len(tokens[0])] * count if example.lengths is None else example.lengths
    notes = [
        ""
        if length == len(row)
        else f"its last {len(row) - length} positions are padding"
        for row, length in zip(tokens, np.asarray(lengths).tolist(), strict=True)
    ]
    sides = collect.Sides(
        tokens,
        tokens,
        answers=_answers(run.task, example, output.logits),
        names=tuple(f"held-out example {i}" for i in range(count)),
        notes=tuple(notes),
    )
    maps = {f"layer {i}": each for i, each in enumerate(output.maps)}
    names = _names(run)
    whole = collect.map_set(maps, sides, name=name)
    layers = [
        layer._replace(heads=tuple(map(str, row)))
        for layer, row in zip(whole.layers, names, strict=True)
    ]
    return whole._replace(layers=tuple(layers))


def _answers(task, example, logits) -> tuple[dossier.Answers, ...]:
    """Returns the likeliest answers of a model and what was asked for."""
    if logits is None:
        return ()
    shares = np.asarray(jax.nn.softmax(logits, -1), np.float64)
    targets = np.asarray(example.targets)
    counts = np.asarray(example.weights) > 0
    whole = targets.ndim == 1
    if whole:
        shares, targets, counts = (
            shares[:, None],
            targets[:, None],
            counts.reshape(-1, 1),
        )
    order = np.argsort(-shares, axis=-1, kind="stable")[..., :_LIKELIEST]
    answers = []
    for own_order, own_shares, own_targets, own_counts in zip(
        order, shares, targets, counts, strict=True
    ):
        likeliest = tuple(
            tuple((task.class_label(int(c)), float(share[c])) for c in best)
            if is_counted
            else ()
            for best, share, is_counted in zip(
                own_order, own_shares, own_counts, strict=True
            )
        )
        wanted = tuple(
            task.class_label(int(c)) if is_counted else ""
            for c, is_counted in zip(own_targets, own_counts, strict=True)
        )
        answers.append(dossier.Answers(wanted, likeliest, whole))
    return tuple(answers)


def _names(run) -> list[list[int]]:
    """Returns for each layer the names of its heads in the unpruned model."""
    return [list(layer.names) for layer in models.heads_of_layers(run.config.model)]
