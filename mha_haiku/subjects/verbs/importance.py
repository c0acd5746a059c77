"""How much a model needs each of its heads, by several measures.

N examples, L layers, H heads of a layer, M measures.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import checks, display
from mha_haiku.lab import heads
from mha_haiku.showing import per_head, tables
from mha_haiku.showing.map_set import Layer, MapSet, PerHead
from mha_haiku.subjects import programs, results
from mha_haiku.subjects.subject import Subject, parts_of, verb

_UNITS = {
    "loss": "nats",
    "accuracy": "share of right answers",
    "exact_match": "share of exact answers",
    "drift": "1 - cosine",
}
_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Importance(results.Result):
    """How much a model needs each of its heads, by one measure or several."""

    title: str  # of which model, and what is measured
    layers: tuple[Layer, ...]
    measures: dict[str, heads.Importance]  # by the names of `heads.MEASURES`
    # Means `[L, H]`, standard errors and ranks of these, with unit and label.
    numbers: dict[str, PerHead]
    step: int
    file_name = "head_importance"

    _repr_html_, show, plot = display.html, display.show, display.plot

    def __repr__(self) -> str:
        return f"Importance({self.title}, {self.measures})"

    @property
    def first(self) -> heads.Importance:
        """The first of the measures: ablation, unless others were asked for."""
        return next(iter(self.measures.values()))

    @property
    def mean(self) -> np.ndarray:
        """The mean of the first measure over examples, `[L, H]`."""
        return self.first.mean

    @property
    def per_example(self) -> np.ndarray:
        """The first measure of each example, `[N, L, H]`."""
        return self.first.per_example

    @property
    def agreement(self) -> np.ndarray:
        """Spearman's rank correlation of the measures, `[M, M]`."""
        found = self.measures.values()
        return np.array([[heads.rank_correlation(a, b) for b in found] for a in found])

    def table(self) -> tables.Table:
        """Makes a table with a row per head."""
        return per_head.table(self.numbers, self.layers)

    def text(self) -> str:
        """Writes the table as text, with the agreement of the measures below it."""
        columns = [tables.Column("agreement")]
        columns += [tables.Column(name, "", "{:.2f}") for name in self.measures]
        rows = [
            {"agreement": name, **dict(zip(self.measures, row, strict=True))}
            for name, row in zip(self.measures, self.agreement.tolist(), strict=True)
        ]
        agreement = tables.Table(columns, rows).text()
        return (
            f"{self.table().text()}\n\n{per_head.legend(self.numbers)}\n"
            "rank: 1 is the most important head; with 95 % of resampled examples it is "
            f"in between\n\n{agreement}\nagreement: Spearman's rank correlation"
        )

    @property
    def picture(self) -> functools.partial:
        """Draws the heads by layer and by rank."""
        return functools.partial(
            per_head.importance_picture, self.numbers, self.layers, title=self.title
        )

    def save(
        self, folder: str | os.PathLike, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Writes a `MapSet` of the numbers as .npz too, for pages of maps."""
        maps = MapSet(self.title, self.layers, (), self.step, self.numbers)
        maps.save(checks.as_path(folder) / f"{self.file_name}.npz")
        return super().save(folder, formats)


@verb(command="head_importance", folder="heads")
def importance(
    subject: Subject,
    measures: str | Sequence[str] | None = None,
    examples: int | Any = 128,
    *,
    metric: str | None = None,
    ablation_value: str = "zero",
) -> Importance:
    """Measures and draws how much a model needs each of its heads.

    The measures are ablation (what ablating a head costs), the gradient of its gate,
    integrated gradients and its confidence. A wrapped function is measured on texts or
    its own examples, with its own metric.

    Args:
      subject: The model.
      measures: Names of mh.heads.MEASURES, or one; default: all for the metric.
      examples: Number of held-out examples to average over, or texts, of which the
        loss of the next token is taken.
      metric: Metric whose change ablation measures: loss, accuracy, exact_match or
        drift; default: the first of the task. Measures by gradients are of the loss, or
        of the drift if that is asked for; `gradient` is not for the drift, which has no
        slope at the whole model.
      ablation_value: Output of ablated heads: zero, mean, resample.

    Raises:
      ValueError: If there is no such measure, metric or ablation value.
    """
    wanted = [measures] if isinstance(measures, str) else measures
    wanted = list(heads.MEASURES if measures is None else wanted)
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
    measured, numbers = {}, {}
    for name in wanted:
        entry = heads.MEASURES[name]
        of_loss = entry.unit == _UNITS["loss"]
        measured_by = metric
        if of_loss and metric not in ("drift", None):
            measured_by = "loss"
        of = programs.measured(placed, examples, metric=measured_by, name=name)
        measured[name] = entry.measure(of, ablation_value=value)
        unit = _UNITS.get(measured_by, "")
        numbers[name] = PerHead(
            measured[name].mean,
            unit if of_loss else entry.unit or unit,
            entry.label.format(metric=measured_by or "metric"),
            measured[name].standard_error,
            heads.rank_intervals(measured[name]),
        )
    batches = programs.batches_given(subject, examples)
    first = None if batches is None else batches[0]
    count = examples if batches is None else len(measured[wanted[0]].per_example)
    plural = "" if count == 1 else "s"
    held_out = "held-out " if batches is None else ""
    return Importance(
        f"{subject.title}: {count} {held_out}example{plural}, "
        f"ablated heads pass on {_PASSED[ablation_value]}",
        tuple(
            Layer.of_model(x.kind, x.layer, i, x.names)
            for i, x in enumerate(parts_of(subject, first))
        ),
        measured,
        numbers,
        subject.step,
    )
