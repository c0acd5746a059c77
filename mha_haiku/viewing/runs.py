"""Runs: a table of what one is, and the page of its maps.

L layers, N examples.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mha_haiku import models
from mha_haiku.report import dossier
from mha_haiku.runs import folders
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
      value: A run in memory, or the path of its folder.
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
    if isinstance(compare, Mapping) and len(compare) == 1:
        (other_name, compare), *_ = compare.items()
    else:
        other_name = "compared"
    if not isinstance(value, folders.Run):
        value = folders.load_run(value)
    title = f"{value.config.task.name}, step {value.step:,}"
    sets = [_set(value, heads, "shown" if compare is not None else "")]
    if compare is not None:
        if not isinstance(compare, folders.Run):
            compare = folders.load_run(_path(compare))
        sets.append(_set(compare, heads, str(other_name)))
        title += f", and {other_name}"
    whole = dossier.Dossier(title, tuple(sets))
    return showing.of_dossier(whole, budget=budget)


def _path(value) -> str | os.PathLike:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"compare must be a run or its folder, got {type(value).__name__}."
        )
    return value


def _set(run, heads, name) -> dossier.MapSet:
    """Returns the maps of a run on its held-out examples."""
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
    if heads is not None or all(row == list(range(len(row))) for row in names):
        return collect.map_set(maps, sides, wanted=heads, name=name)
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
