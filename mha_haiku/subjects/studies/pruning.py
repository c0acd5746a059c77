"""Pruning a run: which heads and hidden units go, what that costs, and the new run.

Heads go by a share, as many as may go, or along the whole curve. Hidden units of the
feed-forward parts go before them where a share is asked for.

N examples, L layers, H heads of a layer, S sizes of a sweep.
"""

import csv
import functools
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.showing import curves
from mha_haiku.showing.tables import Column, Table
from mha_haiku.subjects.studies.workbench import ABLATION_VALUES, Batches, Bench
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import folders, loop

ORDERS = (*heads.MEASURES, "greedy", "random")
_SWEEP_POINTS = 12
_METRICS = ("drift", "exact_match", "accuracy")  # the first that a run has is drawn
_TIMED_SECONDS = 1.0
_ROUNDING = 1e-6  # of a mean metric
# Heads that a step of the greedy order tries at a time: what one program measures.
_TRIES = 16

Keep = list[list[int]]


class Request(NamedTuple):
    """What to prune: a sweep, one of the next two, or a sweep that ends there."""

    sweep: bool = False  # models of every size, up to twelve of them
    keep: float | None = None  # the share of the heads to keep, in [0, 1]
    # How far the held-out accuracy or exact match may fall, or the drift rise, in
    # [0, 1]; see `decisive`.
    metric_drop: float | None = None
    keep_units: float = 1.0  # the share of each layer's hidden units, in (0, 1]
    order: str = "ablation"  # a name of `ORDERS`: which heads go first
    ablation_value: str = "zero"  # while the order is determined
    examples: int = 256  # held-out, which determine the order of heads and units
    baseline: str | None = None  # another order, whose curve a sweep draws too


class Point(NamedTuple):
    """A pruned model."""

    layers: Sequence[models.LayerHeads]  # with the heads that are left
    units: int  # how many hidden units are left, of all layers
    metrics: dict[str, float]  # see `held_out`
    parameters: int
    # Of the forward pass: the median of runs that alternate with the whole model's.
    examples_per_second: float
    speed_up: float  # measured seconds of the whole model over this one's
    ideal_speed_up: float  # operations of the whole model over this one's
    name: str = ""  # of a model that is more than pruned

    @property
    def keep(self) -> Keep:
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


class Pruned(NamedTuple):
    """The result of pruning."""

    title: str  # the run and the order
    run: folders.Run  # the smallest pruned run
    # The whole model, and pruned ones of falling size; the first of these has all heads
    # where hidden units went.
    points: list[Point]
    # What another order of heads gives at each point, in the metric that is drawn; ()
    # where none was asked for.
    baseline: tuple[float, ...] = ()
    baseline_name: str = ""  # the name of that order
    file_name = "pruning"

    def table(self) -> Table:
        """Makes a table with a row per model."""
        columns = [
            *([Column("model")] if self.points[0].name else []),
            Column("heads", csv=("kept",)),
            *map(Column, self.points[0].kinds),
            Column("units"),
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
                "units": point.units,
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

    def text(self) -> str:
        """Writes the table as text, with a legend of its columns."""
        metric, own = next(x for x in _METRICS if x in self.points[0].metrics), ""
        kinds = ", ".join(self.points[0].kinds)
        between_kinds = f", and | between {kinds}" if kinds else ""
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
    """Prunes a run's heads and units in memory; `save` writes the result.

    Raises:
      ConfigError: If the request is not valid, or not for the task of the run.
    """
    check(request)
    bench = bench.looped()
    whole = bench.run
    run = prune_units(bench, request.keep_units, examples=request.examples)
    worst = None
    if request.metric_drop is not None and "loss" not in whole.task.metrics:
        # The order and the end are of different examples: some room.
        worst = 1.5 * request.metric_drop
    rank_heads = functools.partial(
        order_of,
        bench.with_run(run),
        ablation_value=request.ablation_value,
        examples=request.examples,
    )
    order = rank_heads(request.order, worst=worst)
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
    pruned = [prune_heads(run, kept_after(run, order, count)) for count in counts]
    if run is not whole:
        pruned.insert(0, whole)
    result = Pruned(title, pruned[-1], points(bench, pruned))
    if request.baseline is None:
        return result
    other, kept = rank_heads(request.baseline), [point.kept for point in result.points]
    baseline = ablated_in_order(bench.with_run(run), other, kept)
    return result._replace(baseline=tuple(baseline), baseline_name=request.baseline)


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
        checks.choice("order", request.order, ORDERS)
        if request.baseline is not None:
            checks.choice("baseline", request.baseline, ORDERS)
        checks.choice("ablation_value", request.ablation_value, ABLATION_VALUES)
    if request.baseline is not None and not request.sweep:
        raise ConfigError("baseline is for the curve of a sweep; give sweep too.")


def check_free(workdir: str | os.PathLike, *, steps: int) -> None:
    """Raises ConfigError if a folder holds a run that `save` cannot resume."""
    saved = folders.read_config(folders.Folder(checks.as_path(workdir)))
    if saved is None or saved.training.steps != steps:
        folders.check_free(workdir)


def save(run: folders.Run, workdir: str | os.PathLike, *, steps: int) -> Path:
    """Writes a pruned run at step 0, trains it on for some steps; returns its folder.

    The folder may hold this run already, which is trained to its end then: a killed
    process has left it.
    """
    with checks.user_mistakes():
        checks.non_negative_integer("steps", steps)
    config = run.config.replace(training=dict(steps=max(steps, 1)))
    folder = folders.Folder(checks.as_path(workdir))
    before = folders.read_config(folder) if steps else None
    if before is None or before.to_json() != config.to_json():
        folders.write_run(workdir, config, jax.device_get(run.params), run.task)
    if steps:
        loop.train(folders.read_config(folder), folder.root)
    return folder.root


def order_of(
    bench: Bench,
    by: str,
    *,
    ablation_value: str,
    examples: int,
    worst: float | None = None,
) -> list[tuple[int, int]]:
    """Orders the run's heads, (layer, index in the layer), the first to go first.

    The order is one of `ORDERS`, on some held-out examples. Layers of the run must be
    unstacked. The greedy order need not go past the `worst` mean metric: heads that
    would are last, in no particular order.
    """
    with checks.user_mistakes():
        checks.choice("order", by, ORDERS)
    if by == "random":
        all_heads = _heads(bench.run)
        generator = np.random.default_rng(bench.run.config.seed)
        return [all_heads[place] for place in generator.permutation(len(all_heads))]
    value = bench.ablation_value(ablation_value, examples)
    if by == "greedy":
        steps = heads.greedy_order(
            bench.measured(examples),
            ablation_value=value,
            worst=worst,
            tries=_TRIES,
            progress=functools.partial(
                bench.progress, name="greedy order", unit="head"
            ),
        )
        first = [step.head for step in steps]
        return first + [head for head in _heads(bench.run) if head not in first]
    of = bench.measured(examples, name=by)
    with checks.user_mistakes():  # the drift has no gradient
        return heads.order(heads.MEASURES[by].measure(of, ablation_value=value).mean)


def _heads(run) -> list[tuple[int, int]]:
    layers = enumerate(models.heads_of_layers(run.config.model))
    return [(i, place) for i, x in layers for place in range(len(x.names))]


def ablated_in_order(
    bench: Bench, order: Sequence[tuple[int, int]], counts: Sequence[int]
) -> list[float]:
    """Measures the `decisive` metric with the last heads of an order, by their number.

    Layers of the run must be unstacked; the order is from `order_of`.
    """
    metric = decisive(bench.run.task)
    examples = bench.run.config.training.evaluation_examples
    of = bench.measured(examples, metric=metric, name="heads ablated")
    (found,) = ablated(of, [order], [len(order) - count for count in counts])
    return (found if metric == "drift" else 1 - found).tolist()


def ablated(
    of: heads.Measured,
    orders: Sequence[Sequence[tuple[int, int]]],
    counts: Sequence[int],
) -> np.ndarray:
    """Measures the mean metric `[orders, counts]` with the first heads ablated.

    Orders are of (layer, index in the layer).
    """
    layers = models.heads_of_layers(of.model.config)
    shape = len(layers), max(len(layer.names) for layer in layers)
    gates = np.ones((len(orders), len(counts), *shape), np.float32)
    for patterns, order in zip(gates, orders, strict=True):
        for pattern, count in zip(patterns, counts, strict=True):
            for head in order[:count]:
                pattern[tuple(head)] = 0
    found = heads.gated_metric(of, gates.reshape(-1, *shape)).mean(0)
    return found.reshape(gates.shape[:2])


def decisive(task: tasks.Task) -> str:
    """Names the metric of pruned models that is drawn and that may fall or rise."""
    if "loss" not in task.metrics:
        return "drift"
    return "exact_match" if task.counts_exact else "accuracy"


def kept_after(run: folders.Run, order: Sequence[tuple[int, int]], count: int) -> Keep:
    """Lists the names of the last `count` heads of an order, for each layer."""
    layers = models.heads_of_layers(run.config.model)
    gone = set(order[: len(order) - count])
    return [
        [name for place, name in enumerate(layer.names) if (i, place) not in gone]
        for i, layer in enumerate(layers)
    ]


def prune_heads(run: folders.Run, keep: Keep) -> folders.Run:
    """Removes the heads that are not kept; see `heads.prune`."""
    return _with_model(run, *heads.prune(run.params, run.config.model, keep))


def prune_units(bench: Bench, share: float, *, examples: int) -> folders.Run:
    """Keeps a share of the hidden units of each layer.

    The units that stay, at least one, have the largest `heads.unit_gradient`.
    Layers of the run must be unstacked.
    """
    run = bench.run
    if share == 1:
        return run
    if "loss" not in run.task.metrics:
        raise ConfigError(
            "keep_units needs a loss, whose gradients rank hidden units; the task "
            f"{run.task.name} has no targets."
        )
    sizes = models.hidden_sizes(run.config.model)
    of = bench.measured(examples, name="hidden units")
    importance = heads.unit_gradient(of).mean
    keep = [
        np.argsort(-row[:size], kind="stable")[: max(1, round(share * size))]
        for row, size in zip(importance, sizes, strict=True)
    ]
    return _with_model(run, *heads.prune_units(run.params, run.config.model, keep))


def _with_model(run, params, model_config) -> folders.Run:
    config = run.config.replace(model=model_config)
    model = folders.make_model(config, run.task)
    return run._replace(config=config, model=model, params=params)


def points(
    bench: Bench, runs: Sequence[folders.Run], names: Sequence[str] = ()
) -> list[Point]:
    """Measures metrics, size and speed of runs: first the whole one, unstacked."""
    whole = vectors = None
    result = []
    for i, pruned in enumerate(
        bench.progress(runs, name="pruned models", unit="model")
    ):
        if whole is None:  # here, where the bar shows
            whole, vectors = _Timed(runs[0]), vectors_of(runs[0])
        timed = _Timed(pruned)
        before, after = _alternating(whole, timed)
        result.append(
            Point(
                layers=models.heads_of_layers(pruned.config.model),
                units=sum(models.hidden_sizes(pruned.config.model)),
                metrics=held_out(pruned, vectors),
                parameters=sum(np.size(x) for x in jax.tree.leaves(pruned.params)),
                examples_per_second=timed.size / after,
                speed_up=before / after,
                ideal_speed_up=whole.operations / timed.operations,
                name=names[i] if names else "",
            )
        )
    return result


def held_out(run: folders.Run, vectors: np.ndarray | None = None) -> dict[str, float]:
    """Measures the held-out loss and accuracy of a run's parameters.

    For a task without targets it returns `drift`, a mean over examples, and
    `neighbours`, the share of examples whose nearest other example stays the same, both
    compared with the vectors of the whole model; None: this run is whole.
    """
    own = vectors_of(run)
    if own is not None:
        before = own if vectors is None else vectors
        drifts = heads.metrics.drift(own, tasks.Example(None, before, None))
        # Of examples that were drawn twice one counts: the other is too near.
        _, once = np.unique(before.round(3), axis=0, return_index=True)
        same = heads.drift.same_neighbours(before[once], own[once])
        return {"drift": float(drifts.mean()), "neighbours": same}
    training = run.config.training
    placement = devices.Replicas(jax.local_devices()[:1])
    program = evaluation.make_evaluation(
        run.model,
        run.task,
        num_examples=training.evaluation_examples,
        batch_size=training.batch_size,
        placement=placement,
    )
    placed = placement.put((run.params, run.task.held_out_data))
    sums = program(*placed, np.uint32(run.config.seed))
    return evaluation.means(placement.fetch(sums))


def vectors_of(run: folders.Run) -> np.ndarray | None:
    """Returns mean-pooled outputs of held-out examples, `[N, D]`; None with targets."""
    if "loss" in run.task.metrics:
        return None
    training = run.config.training
    count = training.evaluation_examples
    batches = Batches(Bench(run), count, training.batch_size)
    return heads.drift.vectors(run.model, run.params, batches)[:count]


def _names(layers) -> str:
    """Joins the names of heads, with ";" between layers and "|" between kinds."""
    own = itertools.groupby(layers, key=lambda layer: layer.kind)
    return "|".join(
        ";".join(" ".join(map(str, layer.names)) for layer in group) for _, group in own
    )


def picture(path: Path) -> functools.partial:
    """Draws the curve in a pruning.csv that `workbench.write` wrote."""
    text = checks.text_of(path, path)
    try:
        curve = _curve(text)
    except (IndexError, KeyError, StopIteration, TypeError, ValueError):
        raise ConfigError(f"{path} is no curve of pruning.") from None
    return functools.partial(curves.pruning, **curve, title="Heads kept")


def _curve(text: str) -> dict[str, Any]:
    """Reads what `curves.pruning` draws from the text of a pruning.csv."""
    rows = list(csv.DictReader(text.splitlines()))
    names = list(rows[0])
    kinds = names[1 : names.index("units")]
    own = names[names.index("units") + 1 : names.index("parameters")]
    metric = next(name for name in _METRICS if name in own)
    baseline = [name for name in own if name in ORDERS]

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


def _fewest(bench, run, order, drop) -> int:
    """Finds the fewest heads whose loss of accuracy, or drift, is at most `drop`."""
    metric, counts = decisive(run.task), range(len(order), -1, -1)
    sign, vectors = 1 if metric == "drift" else -1, vectors_of(bench.run)

    def badness(count):
        pruned = prune_heads(run, kept_after(run, order, count))
        return sign * held_out(pruned, vectors)[metric]

    most = sign * held_out(bench.run, vectors)[metric] + drop + _ROUNDING
    first = badness(len(order))
    if first > most:
        raise ConfigError(
            f"Without these hidden units the {metric.replace('_', ' ')} is "
            f"{-first:.4f}, which is below the {-most:.4f} that metric_drop allows."
        )
    values = ablated_in_order(bench.with_run(run), order, counts)
    above = np.flatnonzero(first + sign * np.subtract(values, values[0]) > most)
    count = counts[above[0] - 1] if len(above) else 0
    # Ablation weighs examples alike, what is reported weighs them by their targets.
    while count < len(order) and badness(count) > most:
        count += 1
    return count


class _Timed:
    """The compiled forward pass of a run on a batch, its operations and its time."""

    def __init__(self, run: folders.Run):
        self.size = run.config.training.batch_size
        example = Bench(run).held_out(range(self.size))

        @jax.jit
        def forward(params, example):
            output = heads.running.run(run.model, params, example)
            return output.output if output.logits is None else output.logits

        self._arguments = jax.device_put((run.params, example))
        self._compiled = forward.lower(*self._arguments).compile()
        self.operations = self._compiled.cost_analysis()["flops"]
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._compiled(*self._arguments))
        return time.perf_counter() - start


def _alternating(first: _Timed, second: _Timed) -> tuple[float, float]:
    """Measures the median seconds of both."""
    # Measured alternately, so that a slower phase of the machine affects both alike.
    seconds: list[tuple[float, float]] = []
    end = time.perf_counter() + _TIMED_SECONDS
    while time.perf_counter() < end or len(seconds) < 5:
        seconds.append((first.seconds(), second.seconds()))
    return tuple(np.median(seconds, axis=0).tolist())
