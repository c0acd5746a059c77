"""Pruned runs: which heads to remove, what that costs, and how it is saved as a run.

N examples, L layers, H heads of a layer, S sizes of a sweep.
"""

import collections
import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.lab import heads
from mha_haiku.showing.tables import Column
from mha_haiku.subjects.studies.workbench import Batches, Bench
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import folders

ORDERS = (*heads.MEASURES, "greedy", "random")
_TIMED_SECONDS = 1.0

Keep = list[list[int]]


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

    @property
    def keep(self) -> Keep:
        """The names of the heads that each layer keeps."""
        return [list(layer.names) for layer in self.layers]

    @property
    def kept(self) -> int:
        """The number of heads that are left."""
        return sum(map(len, self.keep))


# Heads that a step of the greedy order tries at a time: what one program measures.
_TRIES = 16


def order_of(
    bench: Bench,
    *,
    by: str,
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
    close = bench.ablation_value(ablation_value, examples)
    if by == "greedy":
        steps = heads.greedy_order(
            bench.measured(examples),
            ablation_value=close,
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
        return heads.order(heads.MEASURES[by].measure(of, ablation_value=close).mean)


def _heads(run) -> list[tuple[int, int]]:
    layers = enumerate(models.heads_of_layers(run.config.model))
    return [(i, place) for i, x in layers for place in range(len(x.names))]


def ablated_in_order(
    bench: Bench, order: Sequence[tuple[int, int]], counts: Sequence[int]
) -> list[float]:
    """Measures the `decisive` metric with the last heads of an order, by their number.

    Layers of the run must be unstacked; the order is from `order_of`.
    """
    layers = models.heads_of_layers(bench.run.config.model)
    shape = len(layers), max(len(layer.names) for layer in layers)
    metric = decisive(bench.run.task)
    examples = bench.run.config.training.evaluation_examples
    of = bench.measured(examples, metric=metric, name="heads ablated")
    (found,) = ablated(of, [order], [len(order) - count for count in counts], shape)
    return (found if metric == "drift" else 1 - found).tolist()


def ablated(
    of: heads.Measured,
    orders: Sequence[Sequence[tuple[int, int]]],
    counts: Sequence[int],
    shape: tuple[int, int],
) -> np.ndarray:
    """Measures the mean metric `[orders, counts]` with the first heads ablated.

    Orders are of (layer, index in the layer), and the gates have the shape (L, H).
    """
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


def prune(run: folders.Run, keep: Keep) -> folders.Run:
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


def points(bench: Bench, runs: Sequence[folders.Run]) -> list[Point]:
    """Measures metrics, size and speed of runs: first the whole one, unstacked."""
    whole = vectors = None
    result = []
    for pruned in bench.progress(runs, name="pruned models", unit="model"):
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


def save(run: folders.Run, workdir: str | os.PathLike, *, steps: int) -> Path:
    """Writes a run's parameters as a new run at step 0, and returns its folder.

    The new run is to take that many training steps; 0: it is only pruned. Where there
    are some, the folder may hold this run already, which is left as it is: a killed
    process has trained it.
    """
    config = run.config.replace(training=dict(steps=max(steps, 1)))
    folder = folders.Folder(checks.as_path(workdir))
    before = folders.read_config(folder) if steps else None
    if before is not None and before.to_json() == config.to_json():
        return folder.root
    return folders.write_run(workdir, config, jax.device_get(run.params), run.task)


def vectors_of(run: folders.Run) -> np.ndarray | None:
    """Returns mean-pooled outputs of held-out examples, `[N, D]`; None with targets."""
    if "loss" in run.task.metrics:
        return None
    training = run.config.training
    count = training.evaluation_examples
    batches = Batches(Bench(run), count, training.batch_size)
    return heads.drift.vectors(run.model, run.params, batches)[:count]


def kinds(layers: Sequence[models.LayerHeads]) -> dict[str, int]:
    """Counts the heads of each kind; {} in a model of one kind."""
    counts = collections.Counter()
    for layer in layers:
        if layer.kind:
            counts[layer.kind] += len(layer.names)
    return dict(counts)


def names(layers: Sequence[models.LayerHeads]) -> str:
    """Joins the names of heads, with ";" between layers and "|" between kinds."""
    own = itertools.groupby(layers, key=lambda layer: layer.kind)
    return "|".join(
        ";".join(" ".join(map(str, layer.names)) for layer in group) for _, group in own
    )


def cells(
    layers: Sequence[models.LayerHeads], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Makes the cells of a pruned model in a table."""
    kept = sum(len(layer.names) for layer in layers)
    return {"heads": kept, **kinds(layers), **metrics, "kept": names(layers)}


def columns(metrics: Mapping[str, float]) -> list[Column]:
    """Makes the columns of the metrics of `held_out`."""
    return [
        Column(name, "nats" if name == "loss" else "", "{:.4f}")
        for name in sorted(metrics)
    ]


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
    """Measures the median seconds of both, in turns."""
    # Measured alternately, so that a slower phase of the machine affects both alike.
    seconds: list[tuple[float, float]] = []
    end = time.perf_counter() + _TIMED_SECONDS
    while time.perf_counter() < end or len(seconds) < 5:
        seconds.append((first.seconds(), second.seconds()))
    return tuple(np.median(seconds, axis=0).tolist())
