"""Measures how much a model needs each of its heads.

N examples, L layers, H heads of a layer.
"""

from collections.abc import Sequence
from typing import Any

from mha_haiku.core import checks
from mha_haiku.lab import heads
from mha_haiku.records import Column, Layer
from mha_haiku.subjects import programs, results
from mha_haiku.subjects.subject import Subject, parts_of, verb

_UNITS = {
    "loss": "nats",
    "accuracy": "share of right answers",
    "exact_match": "share of exact answers",
    "drift": "1 - cosine",
}
_NOTES = (
    "rank: 1 is the most important head; with 95 % of resampled examples it is in "
    "between",
)
_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


@verb(command="head_importance", folder="heads")
def importance(
    subject: Subject,
    measures: str | Sequence[str] | None = None,
    examples: int | Any = 128,
    *,
    metric: str | None = None,
    ablation_value: str = "zero",
) -> results.HeadResult:
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
    metric = programs.metric_name(subject, metric)
    if metric == "drift" and "gradient" in wanted:
        if measures is not None:
            reason = "the drift has no slope at the whole model"
            raise checks.ConfigError(f"measures must not have gradient: {reason}.")
        wanted.remove("gradient")
    placed = programs.placed(subject)
    value = programs.ablation_value(placed, ablation_value, examples)
    batches = programs.batches_given(subject, examples)
    columns = {}
    for name in wanted:
        entry = heads.MEASURES[name]
        of_loss = entry.unit == _UNITS["loss"]
        measured_by = metric
        if of_loss and metric not in ("drift", None):
            measured_by = "loss"
        of = programs.measured(placed, examples, metric=measured_by, name=name)
        per_example = entry.measure(of, ablation_value=value).per_example
        assert per_example is not None  # as of every measure
        if batches is None:  # whole batches were measured
            per_example = per_example[:examples]
        unit = _UNITS.get(measured_by or "", "")
        unit = unit if of_loss else entry.unit or unit
        label = entry.label.format(metric=measured_by or "metric")
        columns[name] = Column.of_examples(per_example, unit, label).with_ranks()
    first = None if batches is None else batches[0]
    count = len(columns[wanted[0]].per_example)
    plural = "" if count == 1 else "s"
    held_out = "held-out " if batches is None else ""
    return results.HeadResult(
        f"{subject.title}: {count} {held_out}example{plural}, "
        f"ablated heads pass on {_PASSED[ablation_value]}",
        tuple(
            Layer.of_model(x.kind, x.layer, i, x.names)
            for i, x in enumerate(parts_of(subject, first))
        ),
        columns,
        subject.step,
        _NOTES,
        "head_importance",
    )
