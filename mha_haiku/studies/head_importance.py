"""How much a run needs each of its heads, by several measures, on held-out examples.

N examples, L layers, H heads of a layer, M measures.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mha_haiku import checks, heads, models, report
from mha_haiku.report.heads import PerHead
from mha_haiku.runs import files
from mha_haiku.studies.workbench import METRICS, Bench

_UNITS = {"loss": "nats", "accuracy": "share of right answers"}
_PASSED = {"zero": "zeros", "mean": "their mean", "resample": "another example's"}


class HeadImportance(NamedTuple):
    """How much a run needs each of its heads.

    Attributes:
      title: Which run and step, and what is measured.
      heads: For each layer the names of its heads.
      measures: By their names in `heads.MEASURES`.
      numbers: Their means `[L, H]`, standard errors and ranks, with unit and label.
      agreement: `[M, M]`, Spearman's rank correlation of the measures.
    """

    title: str
    heads: tuple[tuple[int, ...], ...]
    measures: dict[str, heads.Importance]
    numbers: dict[str, PerHead]
    agreement: np.ndarray

    def table(self) -> report.tables.Table:
        """Returns a row per head."""
        layers = range(len(self.heads))
        return report.heads.table(self.numbers, layers=layers, heads=self.heads)

    def text(self) -> str:
        """Returns the table as text, and below how far the measures agree."""
        columns = [report.tables.Column("agreement")]
        columns += [report.tables.Column(name, "", "{:.2f}") for name in self.measures]
        rows = [
            {
                "agreement": name,
                **dict(zip(self.measures, map(float, row), strict=True)),
            }
            for name, row in zip(self.measures, self.agreement, strict=True)
        ]
        agreement = report.tables.Table(columns, rows).text()
        return (
            f"{self.table().text()}\n\n{report.heads.legend(self.numbers)}\n"
            "rank: 1 is the most important head; with 95 % of resampled examples it is "
            f"in between\n\n{agreement}\nagreement: Spearman's rank correlation"
        )

    def picture(self) -> bytes:
        """Returns heads by layer and in order, as the bytes of a PNG file."""
        return report.heads.importance_picture(
            self.numbers, title=self.title, heads=self.heads
        )


def measure(
    bench: Bench,
    *,
    examples: int = 128,
    metric: str = "loss",
    closing: str = "mean",
    measures: Sequence[str] | None = None,
) -> HeadImportance:
    """Runs a trained model on held-out examples and measures its heads.

    Args:
      bench: The run.
      examples: N.
      metric: What ablation is the change of: "loss", or "accuracy" (then its fall). The
        measures by gradients are always of the loss.
      closing: What a closed head passes on: "zero", "mean" or "resample".
      measures: Names of `heads.MEASURES`; None means all.

    Raises:
      ConfigError: If a choice is none.
    """
    wanted = list(heads.MEASURES) if measures is None else list(measures)
    with checks.user_mistakes():
        checks.choice("metric", metric, METRICS)
        for name in wanted:
            checks.choice("measures", name, heads.MEASURES)
    bench = bench.looped().placed()
    close = bench.closing(closing, examples)
    found, numbers = {}, {}
    for name in wanted:
        entry = heads.MEASURES[name]
        own = metric if entry.unit is None else "loss"
        of = bench.subject(examples, metric=own, name=name)
        found[name] = entry.measure(of, closing=close)
        numbers[name] = PerHead(
            found[name].mean,
            entry.unit or _UNITS[own],
            entry.label.format(metric=own),
            found[name].standard_error,
            heads.rank_intervals(found[name]),
        )
    agreement = [
        [heads.rank_correlation(a, b) for b in found.values()] for a in found.values()
    ]
    plural = "" if examples == 1 else "s"
    return HeadImportance(
        f"{bench.title}: {examples} held-out example{plural}, "
        f"closed heads pass on {_PASSED[closing]}",
        tuple(layer.names for layer in models.heads_of_layers(bench.run.config.model)),
        found,
        numbers,
        np.array(agreement),
    )


def write(found: HeadImportance, folder: str | os.PathLike) -> list[Path]:
    """Writes head_importance.csv, a line per head, and the picture beside it.

    Args:
      found: What to write.
      folder: Where to; made where it is missing.

    Returns:
      The paths of the table and, where matplotlib is installed, of the picture.

    Raises:
      ConfigError: If one cannot be written.
    """
    written = [files.write(Path(folder) / "head_importance.csv", found.table().csv())]
    if report.drawing.is_possible():
        path = Path(folder) / "head_importance.png"
        written.append(files.write(path, found.picture()))
    return written
