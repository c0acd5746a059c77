"""Numbers of each head over examples: statistics, roles and importance.

Dimensions: N examples, L layers, H heads, T positions.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.core import attention, checks, display, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads, maps
from mha_haiku.lab import statistics as all_statistics
from mha_haiku.lab.heads import alignment, model_runs
from mha_haiku.records import Column, Heads, Layer
from mha_haiku.records.heads import ROLE
from mha_haiku.subjects import computation, conversion
from mha_haiku.subjects.subject import (
    EXAMPLES,
    Part,
    Subject,
    check_task,
    layers_of,
    part_index,
    parts_of,
    verb,
)
from mha_haiku.training import tasks

_BATCH_POSITIONS = 2**13  # of all examples in a batch
_NOTES = (
    "rank: 1 is the most important head; with 95 % of resampled examples it is in "
    "between",
)
_ALONE = ("of one example there is neither a standard error nor an interval of ranks",)
_QUICK = 5e11  # operations of a measurement that takes seconds
_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


@verb(command="head_statistics", folder="attention")
def statistics(
    subject: Subject,
    examples: int | Any = EXAMPLES,
    *,
    layers: Sequence[int | str] | None = None,
) -> Heads:
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
    own = computation.batches_given(subject, examples, targets=False)
    parts = parts_of(subject, own[0] if own else None)
    layers = chosen_layers(parts, layers)
    if len(layers) == len(parts):
        subject = computation.compact(subject)
    parts = [parts[i] for i in layers]
    if own is None:  # devices need not divide the number and length of given examples
        subject = computation.placed(subject)

    program = _statistics_of_maps(subject, tuple(parts))
    if own is None:
        subject = check_task(subject, "statistics")
        size = computation.batch_size(subject, examples, _BATCH_POSITIONS)
        batches = computation.observations(
            subject, program, range(examples), batch_size=size, name="head statistics"
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
    numbers = all_statistics.summary([each.numbers for each in known], columns)
    what = _counted(len(known[0].numbers["entropy"]), own)
    if np.isnan(numbers["entropy"].mean).all():
        raise ConfigError(f"In {what} every query is fully masked.")
    title = f"{subject.title}: means over {what}"
    kinds = tuple(part.kind for part in parts if part.kind)
    roles = maps.roles(known, columns=columns, kinds=kinds)
    every = range(numbers["entropy"].mean.shape[1])
    measured_layers = tuple(
        Layer.of_model(part.kind, part.layer, i, every)
        for i, part in zip(layers, parts, strict=True)
    )
    return Heads(
        title,
        measured_layers,
        numbers | {ROLE: roles[ROLE]},
        subject.step,
        roles.notes,
        "head_statistics",
    )


def _statistics_of_maps(
    subject: Subject, parts: tuple[Part, ...]
) -> Callable[[Any, tasks.Example], tuple[tasks.Example, list[maps.Seen]]]:
    """Makes a program for what is known of the maps of some parts on a batch."""
    model, marks = subject.model, computation.marks(subject)

    def make() -> Callable:
        def observe(params: Any, example: tasks.Example) -> tuple:
            of_map = functools.partial(_known, model, marks, example)
            found = computation.observed(subject, params, example, of_map, parts)[1]
            return example, found

        return computation.program(subject, observe)

    if model.config is not None:
        return computation.once(subject, ("statistics", parts, marks), make)

    def observe_each(params: Any, example: tasks.Example) -> tuple:
        found = model_runs.maps(model)(params, example)
        of_parts = [found[f"{x.path}/map".removeprefix("/")] for x in parts]
        unedited, _ = model.unedited()
        return example, [
            _program_of_map(unedited, marks, part.kind)(example, attention_map)
            for part, attention_map in zip(parts, of_parts, strict=True)
        ]

    return observe_each


@functools.lru_cache(maxsize=8)
def _program_of_map(
    model: models.Model, marks: model_runs.Marks, kind: str
) -> Callable:
    # Layers of a function are not scanned; those that are alike share this program.
    return model_runs.jit(functools.partial(_known, model, marks, kind=kind))


def _known(
    model: models.Model,
    marks: model_runs.Marks,
    example: tasks.Example,
    attention_map: attention.AttentionMap,
    kind: str,
) -> maps.Seen:
    counted = model_runs.counted_map(attention_map, model, example, kind, marks)
    return maps.known(counted[0], **counted[1])


@verb
def roles(subject: Subject, examples: Any = EXAMPLES) -> Heads:
    """Finds the role of each head on a number of examples, or on texts."""
    align = None if subject.task is None else subject.task.alignments
    batches = computation.batches_of(subject, examples, targets=False, name="examples")
    separators, pictures = computation.marks(subject)
    options: Any = dict(separators=separators, pictures=pictures, align=align)
    first = None if subject.model.config else next(iter(batches))
    found = heads.roles(subject.model, subject.params, batches, **options)
    return dataclasses.replace(
        found,
        layers=layers_of(parts_of(subject, first)),
        title=f"{subject.title}: roles of heads",
        step=subject.step,
        file_name="head_roles",
    )


@verb(command="head_importance", folder="heads")
def importance(
    subject: Subject,
    measures: str | Sequence[str] | None = None,
    examples: int | Any = 128,
    *,
    metric: str | None = None,
    ablation_value: str = "zero",
) -> Heads:
    """Measures and draws how much a model needs each of its heads.

    The measures are ablation (the metric's change without a head), the gradient with
    respect to its gate, integrated gradients and its confidence. A wrapped function is
    measured on texts or its examples, with its metric.

    Args:
      subject: The model.
      measures: Names of mh.heads.MEASURES, or one; default: all for the metric.
      examples: Number of held-out examples to average over, or texts, whose metric is
        the loss of the next token.
      metric: Metric whose change ablation measures: loss, accuracy, exact_match or
        drift; default: the first of the task. Measures by gradients use the loss, or
        the drift if this is the metric; `gradient` does not support the drift, whose
        gradient is zero at the whole model.
      ablation_value: Output of ablated heads: zero, mean, resample.

    Raises:
      ValueError: If there is no such measure, metric or ablation value.
    """
    named = [measures] if isinstance(measures, str) else measures
    wanted = list(heads.MEASURES if named is None else named)
    with checks.user_mistakes():
        for name in wanted:
            checks.choice("measures", name, heads.MEASURES)
    metric = computation.metric_name(subject, metric)
    if metric == "drift" and "gradient" in wanted:
        if measures is not None:
            reason = "the drift has no slope at the whole model"
            raise ConfigError(f"measures must not have gradient: {reason}.")
        wanted.remove("gradient")
    batches = computation.batches_given(subject, examples, metric=metric)
    placed = computation.placed(subject) if batches is None else subject
    value = computation.ablation_value(placed, ablation_value, examples)
    columns = {}
    for name in wanted:
        entry = heads.MEASURES[name]
        uses_loss = entry.unit == "nats" and metric not in ("drift", None)
        measured_by = "loss" if uses_loss else metric
        of = computation.measured(placed, examples, metric=measured_by, name=name)
        column = entry.measure(of, ablation_value=value).first
        per_example = column.per_example
        assert per_example is not None  # as of every measure
        if batches is None:  # whole batches were measured
            per_example = per_example[:examples]
        # A measure may leave its unit and label to where it is registered.
        said = column if column.unit else entry
        column = Column.of_examples(per_example, said.unit or "", said.label)
        columns[name] = column.with_ranks()
    first = None if batches is None else batches[0]
    count = len(columns[wanted[0]].per_example)
    return Heads(
        f"{subject.title}: {_counted(count, batches)}, "
        f"ablated heads pass on {_PASSED[ablation_value]}",
        layers_of(parts_of(subject, first)),
        columns,
        subject.step,
        _NOTES if count > 1 else _ALONE,
        "head_importance",
    )


def quick_importance(subject: Subject, inputs: Any) -> dict[str, Column] | None:
    """Measures ablation on a text or a batch; None if that takes more than seconds.

    It is {} if the inputs have no targets, which the subject's metric needs.
    """
    batch, _ = conversion.batch_of(subject, inputs)
    count = sum(len(part.names) for part in parts_of(subject, batch))
    size = sum(x.size for x in jax.tree.leaves(subject.params))
    is_long = np.shape(batch.inputs)[1] > maps.WHOLE  # attention is quadratic there
    if is_long or 2 * size * count * np.size(batch.inputs) > _QUICK:
        return None
    with contextlib.suppress(ValueError):
        subject = subject.replace(progress=computation.silent)
        column = importance(subject, "ablation", inputs).first
        count = display.count(len(batch.inputs), "example")
        return {"importance": column._replace(label=f"{column.label}, {count}")}
    return {}


@verb
def measured(
    subject: Subject, examples: Any = EXAMPLES, metric: str | None = None
) -> heads.Measured:
    """Makes the argument of measures of `mh.heads`; arguments as in `importance`."""
    return computation.measured(subject, examples, metric=metric, name="examples")


def _counted(count: int, given: Sequence[Any] | None) -> str:
    """Says how many examples were measured, which are held-out unless given."""
    kind = "held-out example" if given is None else "example"
    return f"{count} {kind}{'' if count == 1 else 's'}"


def chosen(name: str, wanted: Sequence[Any] | None, count: int) -> list[int]:
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
    if wanted is None or not wanted:
        return chosen("layers", wanted, len(parts))
    result: list[int] = []
    addresses = [part.address for part in parts]
    for layer in wanted:
        indices = [i for i, part in enumerate(parts) if part.kind == layer]
        with checks.user_mistakes():
            if not indices and isinstance(layer, str):
                checks.choice("a layer", layer.strip(), addresses)
                indices = [addresses.index(layer.strip())]
            result += indices or [part_index(parts, layer, "layers")]
    return result
