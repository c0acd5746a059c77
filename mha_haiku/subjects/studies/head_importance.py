"""How much a run needs each of its heads, by several measures, on held-out examples.

N examples, L layers, H heads of a layer, M measures.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab import heads
from mha_haiku.showing import per_head, tables
from mha_haiku.showing.map_set import Layer, MapSet, PerHead
from mha_haiku.subjects.studies import workbench
from mha_haiku.subjects.studies.workbench import Bench

_UNITS = {
    "loss": "nats",
    "accuracy": "share of right answers",
    "exact_match": "share of exact answers",
    "drift": "1 - cosine",
}
_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


class HeadImportance(NamedTuple):
    """How much a run needs each of its heads."""

    title: str  # which run and step, and what is measured
    layers: tuple[Layer, ...]
    measures: dict[str, heads.Importance]  # by the names of `heads.MEASURES`
    # Means `[L, H]`, standard errors and ranks of these, with unit and label.
    numbers: dict[str, PerHead]
    step: int
    file_name = "head_importance"

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


def measure(
    bench: Bench,
    *,
    examples: int = 128,
    metric: str | None = None,
    ablation_value: str = "zero",
    measures: Sequence[str] | None = None,
) -> HeadImportance:
    """Measures how much each head of a run matters on held-out examples.

    Args:
      bench: The run.
      examples: N.
      metric: Ablation measures the rise of the "loss", the fall of the "accuracy" or of
        the "exact_match", or the "drift"; None: the first that the task has. The
        measures by gradients are of the loss, or of the drift if that is asked for;
        `gradient` is not for it, as the drift has no slope at the whole model.
      ablation_value: A name of `workbench.ABLATION_VALUES`.
      measures: Names of `heads.MEASURES`; None means all that are for the metric.

    Raises:
      ConfigError: If there is no such measure, metric or ablation value.
    """
    wanted = list(heads.MEASURES) if measures is None else list(measures)
    with checks.user_mistakes():
        for name in wanted:
            checks.choice("measures", name, heads.MEASURES)
    metric = bench.metric(metric)
    if metric == "drift" and "gradient" in wanted:
        if measures is not None:
            reason = "the drift has no slope at the whole model"
            raise checks.ConfigError(f"measures must not have gradient: {reason}.")
        wanted.remove("gradient")
    bench = bench.looped().placed()
    value = bench.ablation_value(ablation_value, examples)
    measured, numbers = {}, {}
    for name in wanted:
        entry = heads.MEASURES[name]
        of_loss = entry.unit == _UNITS["loss"]
        own = "loss" if of_loss and metric != "drift" else metric
        of = bench.measured(examples, metric=own, name=name)
        measured[name] = entry.measure(of, ablation_value=value)
        numbers[name] = PerHead(
            measured[name].mean,
            _UNITS[own] if of_loss else entry.unit or _UNITS[own],
            entry.label.format(metric=own),
            measured[name].standard_error,
            heads.rank_intervals(measured[name]),
        )
    layers = models.heads_of_layers(bench.run.config.model)
    plural = "" if examples == 1 else "s"
    return HeadImportance(
        f"{bench.title}: {examples} held-out example{plural}, "
        f"ablated heads pass on {_PASSED[ablation_value]}",
        tuple(
            Layer.of_model(layer.kind, layer.layer, i, layer.names)
            for i, layer in enumerate(layers)
        ),
        measured,
        numbers,
        bench.run.step,
    )


def write(
    result: HeadImportance, folder: str | os.PathLike, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Writes head_importance.csv, a picture, and a `MapSet` of the numbers as .npz."""
    maps = MapSet(result.title, result.layers, (), result.step, result.numbers)
    maps.save(Path(folder) / f"{result.file_name}.npz")
    return workbench.write(result, folder, formats)
