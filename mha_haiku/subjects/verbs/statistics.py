"""Statistics and roles of heads over held-out examples.

Dimensions: N examples, L layers, H heads, T positions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.lab.heads import alignment, running
from mha_haiku.records import Layer
from mha_haiku.records.heads import ROLE
from mha_haiku.showing import collecting
from mha_haiku.subjects import programs, results
from mha_haiku.subjects.subject import (
    EXAMPLES,
    Part,
    Subject,
    check_task,
    parts_of,
    verb,
)

_BATCH_POSITIONS = 2**13  # of all examples in a batch


@verb(command="head_statistics", folder="attention")
def statistics(
    subject: Subject,
    examples: int | Any = EXAMPLES,
    *,
    layers: Sequence[int | str] | None = None,
) -> results.HeadResult:
    """Measures and draws statistics of each head over held-out examples.

    No map is stored, so inputs may have any length. Padding is left out, and all
    examples have the same weight. If the task knows where the rows of cross-attention
    should look, the shares of its alignments are among the numbers; see
    `heads.alignment`.

    Args:
      subject: The model.
      examples: Number of held-out examples to average over, or texts.
      layers: Layers, as 0,2 or, of an encoder-decoder, cross.0,decoder; default: all.
    """
    own = programs.batches_given(subject, examples, targets=False)
    parts = parts_of(subject, own[0] if own else None)
    layers = chosen_layers(parts, layers)
    if len(layers) == len(parts):
        subject = programs.compact(subject)
    parts = [parts[i] for i in layers]
    subject = programs.placed(subject)

    def observe(params, example):
        def known(attention_map, kind):
            return collecting.known(
                attention_map,
                kind,
                tokens=running.tokens(example, kind),
                lengths=running.key_lengths(example, kind),
            )

        return example, programs.observed(subject, params, example, known, parts)[1]

    program = programs.program(subject, observe)
    if own is None:
        subject = check_task(subject, "statistics")
        size = programs.batch_size(subject, examples, _BATCH_POSITIONS)
        batches = programs.observations(
            subject,
            program,
            range(examples),
            batch_size=size,
            name="head statistics",
        )
    else:
        batches = (jax.device_get(program(subject.params, batch)) for batch in own)
    aligned = []
    for example, of_layers in batches:
        alignments = {}
        if subject.task is not None:
            alignments = alignment.of_batch(subject.task.alignments, example)
        aligned.append([layer_seen.aligned(alignments) for layer_seen in of_layers])
    known = jax.tree.map(lambda *x: np.concatenate(x), *aligned)
    columns = [part.names for part in parts]
    numbers = collecting.summary([each.numbers for each in known], columns)
    count = examples if own is None else sum(len(batch.inputs) for batch in own)
    what = f"{'held-out ' if own is None else ''}example{'' if count == 1 else 's'}"
    if np.isnan(numbers["entropy"].mean).all():
        raise ConfigError(f"In {count} {what} every query is fully masked.")
    title = f"{subject.title}: means over {count} {what}"
    kinds = tuple(part.kind for part in parts if part.kind)
    roles = collecting.roles(known, columns=columns, kinds=kinds)
    every = range(numbers["entropy"].mean.shape[1])
    measured_layers = tuple(
        Layer.of_model(part.kind, part.layer, i, every)
        for i, part in zip(layers, parts, strict=True)
    )
    return results.HeadResult(
        title,
        measured_layers,
        numbers | {ROLE: roles[ROLE]},
        subject.step,
        roles.notes,
        "head_statistics",
    )


@verb
def roles(subject: Subject, examples: Any = EXAMPLES) -> heads.Heads:
    """Finds the role of each head on a number of examples, or on texts."""
    align = None if subject.task is None else subject.task.alignments
    batches = programs.batches_given(subject, examples, targets=False)
    if batches is None:
        batches = programs.batches_of(subject, examples, name="examples")
    return heads.roles(subject.model, subject.params, batches, align=align)


@verb
def measured(
    subject: Subject, examples: Any = EXAMPLES, metric: str | None = None
) -> heads.Measured:
    """Makes the argument of measures of `mh.heads`; arguments as in `importance`."""
    return programs.measured(subject, examples, metric=metric, name="examples")


def chosen(name: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    """Checks and lists the wanted layers or heads of `count`; None means all."""
    if wanted is None:
        return list(range(count))
    if not wanted:
        raise ConfigError(f"{name} must not be empty.")
    with checks.user_mistakes():
        return [checks.integer_in(name, index, 0, count - 1) for index in wanted]


def chosen_layers(
    parts: Sequence[Part], wanted: Sequence[int | str] | None
) -> list[int]:
    """Finds the indices of the wanted layers, counted over all kinds.

    Layers are indices, addresses ("cross.0"; "3" if there is one kind), or kinds
    ("cross") for all layers of a kind; None means all.
    """
    if wanted is None:
        return chosen("layers", None, len(parts))
    result: list[Any] = []
    addresses = [part.address for part in parts]
    for layer in wanted:
        indices = [i for i, part in enumerate(parts) if part.kind == layer]
        if not indices and isinstance(layer, str):
            with checks.user_mistakes():
                checks.choice("a layer", layer.strip(), addresses)
            indices = [addresses.index(layer.strip())]
        result += indices or [layer]
    return chosen("layers", result, len(parts))
