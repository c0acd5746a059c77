"""Measures quality and speed of models pruned to all sizes.

N examples, L layers, H heads of a layer.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.lab.heads import model_runs
from mha_haiku.records import Result
from mha_haiku.records.tables import Column, Table
from mha_haiku.showing import curves
from mha_haiku.subjects import computation
from mha_haiku.subjects.subject import Part, Subject, has_task, parts_of, verb
from mha_haiku.subjects.verbs import pruned_models, quality
from mha_haiku.training import tasks

_METRICS = "drift", "exact_match", "accuracy", "loss"  # the first there is is drawn
_TIMED_SECONDS = 1.0


class Point(NamedTuple):
    """A pruned model."""

    layers: Sequence[models.LayerHeads | Part]  # with the heads that are left
    metrics: dict[str, float]  # see `metrics`
    parameters: int
    # Of the forward pass: the median of runs that alternate with the whole model's.
    examples_per_second: float
    speed_up: float  # measured seconds of the whole model over this one's
    ideal_speed_up: float  # operations of the whole model over this one's
    name: str = ""  # of a model that is more than pruned

    @property
    def keep(self) -> pruned_models.Keep:
        """The names of the heads that each layer keeps."""
        return [list(layer.names) for layer in self.layers]

    @property
    def kept(self) -> int:
        """The number of heads that are left."""
        return sum(map(len, self.keep))

    @property
    def kinds(self) -> dict[str, int]:
        """The number of heads of each kind; {} in a model of one kind."""
        kinds = dict.fromkeys(layer.kind for layer in self.layers if layer.kind)
        return {k: sum(len(x.names) for x in self.layers if x.kind == k) for k in kinds}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pruned(Result):
    """Pruned models of falling size."""

    title: str  # the model and the order
    smallest: Subject
    points: list[Point]  # the whole model, and pruned ones of falling size
    # The drawn metric of another order of heads at each point; () without a baseline.
    baseline: tuple[float, ...] = ()
    baseline_name: str = ""  # the name of that order
    file_name = "pruning"

    def table(self) -> Table:
        """Makes a table with a row per model."""
        columns = [
            *([Column("model")] if self.points[0].name else []),
            Column("heads", csv=("kept",)),
            *map(Column, self.points[0].kinds),
            *(
                Column(name, "nats" if name == "loss" else "", "{:.4f}")
                for name in sorted(self.points[0].metrics)
            ),
            *([Column(self.baseline_name, "", "{:.4f}")] if self.baseline else []),
            Column("parameters", shown="{:,}"),
            Column("examples/s", shown="{:,.0f}", csv=("examples_per_second",)),
            Column("faster", shown="{:.2f}x"),
            Column("ideal", shown="{:.2f}x"),
            Column("kept", csv=("keep",)),
        ]
        rows = [
            {
                "model": point.name,
                "heads": point.kept,
                **point.kinds,
                **point.metrics,
                self.baseline_name: baseline,
                "parameters": point.parameters,
                "examples/s": point.examples_per_second,
                "faster": point.speed_up,
                "ideal": point.ideal_speed_up,
                "kept": _names(point.layers),
            }
            for point, baseline in itertools.zip_longest(self.points, self.baseline)
        ]
        return Table(columns, rows)

    def text(self, count: int | None = None) -> str:
        """Writes the table as text, with a legend of its columns."""
        metric, legend = next(x for x in _METRICS if x in self.points[0].metrics), ""
        kinds = ", ".join(self.points[0].kinds)
        between_kinds = f", and | between {kinds}" if kinds else ""
        if metric == "drift":
            legend = (
                "drift: 1 - cosine of a sentence's vectors, whole and pruned\n"
                "neighbours: the share of sentences whose nearest other one stays\n"
            )
        if of := getattr(self.points[0].metrics, "of", ""):
            legend += f"loss: the {of}\n"
        if self.baseline:
            spoken = metric.replace("_", " ")
            legend += f"{self.baseline_name}: the {spoken} with heads in that order\n"
        return (
            f"{self.title}\n\n{self.table().text(count=count)}\n\n{legend}"
            "faster: the forward pass, alternating with the whole model\n"
            "ideal: by the number of operations\n"
            f"kept: the heads of each layer, with ; between layers{between_kinds}"
        )

    @property
    def picture(self) -> functools.partial:
        """Draws the curve of a sweep."""
        points = self.points
        metric = next(name for name in _METRICS if name in points[0].metrics)
        metrics = {"this order": [x.metrics[metric] for x in points]}
        if self.baseline:
            metrics[f"order: {self.baseline_name}"] = list(self.baseline)
        return functools.partial(
            curves.pruning,
            [x.kept for x in points],
            metrics,
            {
                "measured": [x.speed_up for x in points],
                "by operations": [x.ideal_speed_up for x in points],
            },
            {kind: [x.kinds[kind] for x in points] for kind in points[0].kinds},
            metric_name=f"held-out {metric.replace('_', ' ')}",
            title=self.title,
        )


@verb
def sweep(
    subject: Subject,
    *,
    keep: float | None = None,
    metric_drop: float | None = None,
    order: str = "ablation",
    ablation_value: str = "zero",
    examples: int | Any = pruned_models.EXAMPLES,
    baseline: str | None = None,
    sizes: int = 12,
) -> Pruned:
    """Measures models of every size, and draws the curve.

    Options are as in `prune`; `keep` or `metric_drop` sets the end of the curve.

    Args:
      subject: The model.
      keep: Share of the heads to keep, in [0, 1].
      metric_drop: Tolerated fall of held-out accuracy or exact match, or rise of the
        drift or of a wrapped model's metric.
      order: Order of removal: greedy, random, or a measure.
      ablation_value: Output of ablated heads: zero, mean, resample.
      examples: Number of held-out examples that determine the order; or the examples
        of a wrapped model, such as texts, on which it is measured, too.
      baseline: Another order to compare with in a sweep: random.
      sizes: Number of models of a sweep, at most, next to the whole one.
    """
    how = keep, metric_drop, order, ablation_value, examples
    with checks.user_mistakes():
        if baseline is not None:
            checks.choice("baseline", baseline, pruned_models.ORDERS)
        checks.positive_integer("sizes", sizes)
    smaller = pruned_models.shrunk(subject, "sweep", sizes, *how)
    measured = points(smaller, examples=examples)
    count = len(pruned_models.all_heads(smaller[0]))
    title = f"{subject.title}: {count} heads, order by {order}"
    if baseline is None:
        return Pruned(title, smaller[-1], measured)
    other = pruned_models.order_of(
        smaller[0], baseline, ablation_value=ablation_value, examples=examples
    )
    counts = [point.kept for point in measured]
    values = pruned_models.ablated_in_order(smaller[0], other, counts, examples)
    return Pruned(title, smaller[-1], measured, tuple(values), baseline)


def points(
    subjects: Sequence[Subject], names: Sequence[str] = (), examples: Any = None
) -> list[Point]:
    """Measures subjects, the whole one first; wrapped models on these examples."""
    whole = vectors = None
    result = []
    for i, pruned in enumerate(
        subjects[0].progress(subjects, name="pruned models", unit="model")
    ):
        if whole is None:  # here, where the bar shows
            whole = _Timed(subjects[0], examples)
            vectors = quality.vectors_of(pruned) if has_task(pruned) else None
        timed = _Timed(pruned, examples)
        before, after = _alternating(whole, timed)
        result.append(
            Point(
                layers=pruned.left or parts_of(pruned),
                metrics=quality.held_out(pruned, vectors)
                if has_task(pruned)
                else quality.metrics(pruned, examples=examples),
                parameters=sum(np.size(x) for x in jax.tree.leaves(pruned.params)),
                examples_per_second=timed.size / after,
                speed_up=before / after,
                ideal_speed_up=whole.operations / timed.operations,
                name=names[i] if names else "",
            )
        )
    return result


def _names(layers: Sequence[models.LayerHeads | Part]) -> str:
    """Joins the names of heads, with ";" between layers and "|" between kinds."""
    by_kind = itertools.groupby(layers, key=lambda layer: layer.kind)
    return "|".join(
        ";".join(" ".join(map(str, layer.names)) for layer in group)
        for _, group in by_kind
    )


class _Timed:
    """A compiled forward pass on a batch, its operations and its time."""

    def __init__(self, subject: Subject, examples: Any):
        if has_task(subject):
            size = range(subject.config.training.batch_size)
            example = computation.held_out(subject, size)
        else:
            example, *_ = computation.batches_of(subject, examples)
        self.size = len(example.inputs)

        @jax.jit
        def forward(params: Any, example: tasks.Example) -> jax.Array:
            output = model_runs.run(subject.model, params, example)
            return output.output if output.logits is None else output.logits

        self._arguments = jax.device_put((subject.params, example))
        self._compiled = forward.lower(*self._arguments).compile()
        self.operations = (self._compiled.cost_analysis() or {})["flops"]
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._compiled(*self._arguments))
        return time.perf_counter() - start


def _alternating(first: _Timed, second: _Timed) -> tuple[float, float]:
    # Measured alternately, so that a slower phase of the machine affects both alike.
    seconds: list[tuple[float, float]] = []
    end = time.perf_counter() + _TIMED_SECONDS
    while time.perf_counter() < end or len(seconds) < 5:
        seconds.append((first.seconds(), second.seconds()))
    return tuple(np.median(seconds, axis=0).tolist())
