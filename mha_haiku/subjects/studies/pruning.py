"""Pruning a run's heads: a share of them, as many as may go, or the whole curve.

Hidden units of the feed-forward parts go before them where a share is asked for.
"""

import csv
import functools
import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.showing import curves
from mha_haiku.showing.tables import Column, Table
from mha_haiku.subjects.studies import pruned_runs
from mha_haiku.subjects.studies.workbench import ABLATION_VALUES, Bench
from mha_haiku.training.runs import folders, loop

_SWEEP_POINTS = 12
_METRICS = ("drift", "exact_match", "accuracy")  # the first that a run has is drawn


class Request(NamedTuple):
    """What to prune: a sweep, one of the next two, or a sweep that ends there."""

    sweep: bool = False  # models of every size, up to twelve of them
    keep: float | None = None  # the share of the heads to keep, in [0, 1]
    # How far the held-out accuracy or exact match may fall, or the drift rise, in
    # [0, 1]; see `pruned_runs.decisive`.
    metric_drop: float | None = None
    keep_units: float = 1.0  # the share of each layer's hidden units, in (0, 1]
    order: str = "ablation"  # a name of `pruned_runs.ORDERS`: which heads go first
    ablation_value: str = "zero"  # while the order is determined
    examples: int = 256  # held-out, which determine the order of heads and units
    baseline: str | None = None  # another order, whose curve a sweep draws too


class Pruned(NamedTuple):
    """The result of pruning."""

    title: str  # the run and the order
    run: folders.Run  # the smallest pruned run
    # The whole model, and pruned ones of falling size; the first of these has all heads
    # where hidden units went.
    points: list[pruned_runs.Point]
    # What another order of heads gives at each point, in the metric that is drawn; ()
    # where none was asked for.
    baseline: tuple[float, ...] = ()
    baseline_name: str = ""  # the name of that order
    file_name = "pruning"

    def table(self) -> Table:
        """Makes a table with a row per model."""
        own = pruned_runs.columns(self.points[0].metrics)
        if self.baseline:
            own.append(Column(self.baseline_name, "", "{:.4f}"))
        columns = [
            Column("heads", csv=("kept",)),
            *map(Column, pruned_runs.kinds(self.points[0].layers)),
            Column("units"),
            *own,
            Column("parameters", shown="{:,}"),
            Column("examples/s", shown="{:,.0f}", csv=("examples_per_second",)),
            Column("faster", shown="{:.2f}x"),
            Column("ideal", shown="{:.2f}x"),
            Column("kept", csv=("keep",)),
        ]
        rows = [
            {
                **pruned_runs.cells(point.layers, point.metrics),
                "units": point.units,
                **({self.baseline_name: baseline} if self.baseline else {}),
                "parameters": point.parameters,
                "examples/s": point.examples_per_second,
                "faster": point.speed_up,
                "ideal": point.ideal_speed_up,
            }
            for point, baseline in itertools.zip_longest(self.points, self.baseline)
        ]
        return Table(columns, rows)

    def text(self) -> str:
        """Writes the table as text, with a legend of its columns."""
        metric, own = next(x for x in _METRICS if x in self.points[0].metrics), ""
        kinds = pruned_runs.kinds(self.points[0].layers)
        between_kinds = f", and | between {', '.join(kinds)}" if kinds else ""
        if metric == "drift":
            own = (
                "drift: 1 - cosine of a sentence's vectors, whole and pruned\n"
                "neighbours: the share of sentences whose nearest other one stays\n"
            )
        if self.baseline:
            spoken = metric.replace("_", " ")
            own += f"{self.baseline_name}: the {spoken} with heads in that order\n"
        return (
            f"{self.title}\n\n{self.table().text()}\n\n{own}"
            "faster: the forward pass, alternating with the whole model\n"
            "ideal: by the number of operations\n"
            "units: the hidden units of all layers\n"
            f"kept: the heads of each layer, with ; between layers{between_kinds}"
        )

    @property
    def picture(self) -> functools.partial:
        """Draws the curve of a sweep."""
        curve = _curve(self.table().csv())
        return functools.partial(curves.pruning, **curve, title=self.title)


def prune(bench: Bench, request: Request) -> Pruned:
    """Prunes a run's heads and units in memory; `save` writes the result."""
    check(request)
    bench = bench.looped()
    whole = bench.run
    run = pruned_runs.prune_units(bench, request.keep_units, examples=request.examples)
    worst = None
    if request.metric_drop is not None and "loss" not in whole.task.metrics:
        # The order and the end are of different examples: some room.
        worst = 1.5 * request.metric_drop
    order_of = functools.partial(
        pruned_runs.order_of,
        bench.with_run(run),
        ablation_value=request.ablation_value,
        examples=request.examples,
    )
    order = order_of(by=request.order, worst=worst)
    total = len(order)
    title = f"{bench.title}: {total} heads, order by {request.order}"
    if request.keep is not None:
        fewest = round(request.keep * total)
    elif request.metric_drop is not None:
        fewest = _fewest(bench, run, order, request.metric_drop)
    else:
        fewest = 0
    counts = [total, fewest]
    if request.sweep:
        shares = np.linspace(fewest, total, _SWEEP_POINTS + 1)
        counts = sorted({round(share) for share in shares}, reverse=True)
    pruned = [_with_heads(run, order, count) for count in counts]
    if run is not whole:
        pruned.insert(0, whole)
    result = Pruned(title, pruned[-1], pruned_runs.points(bench, pruned))
    if request.baseline is None:
        return result
    other, kept = order_of(by=request.baseline), [point.kept for point in result.points]
    baseline = pruned_runs.ablated_in_order(bench.with_run(run), other, kept)
    return result._replace(baseline=tuple(baseline), baseline_name=request.baseline)


def check_free(workdir: str | os.PathLike, *, steps: int) -> None:
    """Raises ConfigError if a folder holds a run that `save` cannot resume."""
    saved = folders.read_config(folders.Folder(checks.as_path(workdir)))
    if saved is None or saved.training.steps != steps:
        folders.check_free(workdir)


def save(run: folders.Run, workdir: str | os.PathLike, *, steps: int) -> Path:
    """Writes a pruned run, trains it on for some steps, and returns its folder."""
    with checks.user_mistakes():
        checks.non_negative_integer("steps", steps)
    folder = pruned_runs.save(run, workdir, steps=steps)
    if steps:
        config = folders.load_run(folder).config
        loop.train(config, folder)
    return folder


def read_curve(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a pruning.csv that `workbench.write` wrote, for `curves.pruning`."""
    text = checks.text_of(path, path)
    try:
        return _curve(text)
    except (IndexError, KeyError, StopIteration, TypeError, ValueError):
        raise ConfigError(f"{path} is no curve of pruning.") from None


def _curve(text: str) -> dict[str, Any]:
    """Reads the curve from the text of a pruning.csv."""
    rows = list(csv.DictReader(text.splitlines()))
    names = list(rows[0])
    kinds = names[1 : names.index("units")]
    own = names[names.index("units") + 1 : names.index("parameters")]
    metric = next(name for name in _METRICS if name in own)
    baseline = [name for name in own if name in pruned_runs.ORDERS]

    def numbers(name):
        return [float(row[name]) for row in rows]

    others = {f"order: {name}": numbers(name) for name in baseline}
    return {
        "kept": [int(row["kept"]) for row in rows],
        "metrics": {"this order": numbers(metric)} | others,
        "speed_ups": {"measured": numbers("faster"), "by operations": numbers("ideal")},
        "kinds": {kind: [int(row[kind]) for row in rows] for kind in kinds},
        "metric_name": f"held-out {metric.replace('_', ' ')}",
    }


def check(request: Request) -> None:
    """Raises ConfigError if a request is not valid."""
    asked = [request.keep is not None, request.metric_drop is not None]
    if sum(asked) > 1 or not (request.sweep or any(asked)):
        raise ConfigError(
            "Give sweep, or one of keep and metric_drop; or sweep with one of them, "
            "where it ends.\nWith keep=1 all heads stay."
        )
    for name in ("keep", "metric_drop"):
        value = getattr(request, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name} must be a number in [0, 1], got {value!r}.")
    share = request.keep_units
    if not 0 < share <= 1:
        raise ConfigError(f"keep_units must be a number in (0, 1], got {share!r}.")
    with checks.user_mistakes():
        checks.positive_integer("examples", request.examples)
        checks.choice("order", request.order, pruned_runs.ORDERS)
        if request.baseline is not None:
            checks.choice("baseline", request.baseline, pruned_runs.ORDERS)
        checks.choice("ablation_value", request.ablation_value, ABLATION_VALUES)
    if request.baseline is not None and not request.sweep:
        raise ConfigError("baseline is for the curve of a sweep; give sweep too.")


def _with_heads(run, order, count) -> folders.Run:
    """Prunes the run to that many heads."""
    return pruned_runs.prune(run, pruned_runs.kept_after(run, order, count))


def _fewest(bench, run, order, drop) -> int:
    """Finds the fewest heads whose loss of accuracy, or drift, is at most `drop`."""
    whole = bench.run
    if "loss" not in whole.task.metrics:
        counts = list(range(len(order), -1, -1))
        drifts = pruned_runs.ablated_in_order(bench, order, counts)
        above = [x for x, drift in zip(counts, drifts, strict=True) if drift > drop]
        return min(len(order), 1 + above[0]) if above else 0
    metric, least = pruned_runs.decisive(whole.task), None
    counts = range(len(order), -1, -1)
    for count in bench.progress(counts, name="fewest heads", unit="model"):
        if least is None:  # here, where the bar shows
            least = pruned_runs.held_out(whole)[metric] - drop
        value = pruned_runs.held_out(_with_heads(run, order, count))[metric]
        if value >= least:
            continue
        if count == len(order):
            raise ConfigError(
                f"Without these hidden units the {metric.replace('_', ' ')} is "
                f"{value:.4f}, which is below the {least:.4f} that metric_drop allows."
            )
        return count + 1
    return 0
