"""The `Trainer` of a run: its state, compiled programs, reports and checkpoints.

Runs that differ only in their seeds can share a trainer, which trains them all at once.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import (
    devices,
    evaluation,
    losses,
    optimizers,
    stepping,
    tasks,
)
from mha_haiku.training.runs import folders, metrics_log, starting

_logger = logging.getLogger("mha_haiku")

# How long a dispatch may take, so that an interruption is noticed in time.
_SECONDS_PER_DISPATCH = 1.0


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became infinite or NaN; the last checkpoint is good."""


def _restored(
    stored: Any,
    abstract: stepping.TrainState,
    transformation: optax.GradientTransformation,
) -> stepping.TrainState:
    alone = stepping.Parameters(abstract.step, abstract.params)
    if stored.fields() != {f".{field}" for field in alone._fields}:
        return stored.restore(abstract)
    alone = stored.restore(alone)
    return _state_of(alone.params, transformation)._replace(step=alone.step)


def _state_of(
    params: Any, transformation: optax.GradientTransformation
) -> stepping.TrainState:
    """Makes the state before the first step from parameters, on the host."""
    return jax.tree.map(np.asarray, stepping.state_of(params, transformation))


def _check_fits(abstract: stepping.TrainState, count: int, platform: str) -> None:
    size = count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    memory = checks.memory()
    if platform != "cpu":  # CPU devices share the memory of a machine
        limits = (device.memory_stats() or {} for device in jax.local_devices())
        memory = sum(x.get("bytes_limit", math.inf) for x in limits)
    memory *= jax.process_count()
    if size > memory:
        raise ConfigError(
            f"config.model and config.optimizer must fit into {memory / 2**30:.3g} GiB "
            "of memory; the parameters and the optimizer's state take "
            f"{size / 2**30:.3g} GiB."
        )


class Window:
    """Sums over the steps since the last report.

    The finite steps are added one by one in float64, so the bits depend neither on
    the division into dispatches nor on interruptions.
    """

    def __init__(self, numbers: Mapping[str, float] | None = None):
        """Continues from the `numbers` of another window, or opens a new one."""
        self.numbers = dict(numbers or {"steps": 0, "seconds": 0.0})

    def add(self, report: stepping.Report, seconds: float) -> None:
        numbers, finite = self.numbers, report.finite
        numbers["steps"] += len(finite)
        numbers["seconds"] += seconds
        if not finite.any():
            return
        for name, values in report.sums._asdict().items():
            if values is not None:
                total = numbers.get(name, 0.0)
                for value in values[finite].tolist():  # `sum` may be more precise
                    total += value
                numbers[name] = total
        numbers["gradient_norm"] = float(report.gradient_norm[finite][-1])

    def metrics(self, batch_size: int) -> dict[str, float]:
        """Averages over the steps, with the last gradient's norm; {} without steps."""
        numbers, means = self.numbers, {}
        if not numbers["steps"]:
            return {}
        if "gradient_norm" in numbers:
            names = [name for name in losses.Sums._fields if name in numbers]
            sums: dict[str, Any] = {name: numbers[name] for name in names}
            means = evaluation.means(losses.Sums(**sums))
            means["gradient_norm"] = numbers["gradient_norm"]
        rate = numbers["steps"] * batch_size / numbers["seconds"]
        return {**means, "examples_per_second": rate}


@dataclasses.dataclass(eq=False)
class Trainee:
    """One of the models that a `Trainer` trains, with its files."""

    run: starting.Opened
    start: int  # the step at which it started or resumed
    skipped: int  # of the steps it has taken, those that were not finite
    least_rise: float  # how many nats a loss rises at least that jumps
    log: metrics_log.MetricsLog | metrics_log.Silent = metrics_log.Silent()
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # last reported
    window: Window = dataclasses.field(default_factory=Window)
    failure: str = ""  # why it has ended; "" while it trains
    observers: Sequence[Any] = ()  # see `loop.Observer`

    def __post_init__(self):
        self.seed, self.stored = self.run.config.seed, self.run.stored
        self.step = self.start  # the steps it has taken

    def take(
        self, report: stepping.Report, state: Any, max_skips: int, seconds: float
    ) -> int:
        """Logs the steps of a dispatch, and returns their number."""
        first, self.step = self.step, int(state.step)
        taken = self.step - first
        if not taken:
            return 0
        report = jax.tree.map(lambda x: x[:taken], report)
        self.window.add(report, seconds)
        events = metrics_log.events_of_steps(
            first, report, self.skipped, least_rise=self.least_rise
        )
        for event in events:
            self.log.event(event)
        self.skipped = int(state.health.skipped)
        if state.health.skipped_in_a_row > max_skips:
            what = f"The {events[-1]['what']} is not finite at step {self.step}"
            if max_skips:
                what += f", as in all of the last {state.health.skipped_in_a_row} steps"
            self.fail(what)
        return taken

    def evaluate(self, sums: losses.Sums) -> None:
        means = evaluation.means(sums)
        if not math.isfinite(means["loss"]):
            self.fail(f"The held-out loss is not finite at step {self.step}")
            return
        self.metrics |= {f"held_out_{name}": value for name, value in means.items()}

    def fail(self, what: str) -> None:
        kept = "no checkpoint has been saved"
        if (good := self.stored.latest()) is not None:
            kept = f"the last good checkpoint is of step {good}"
        self.failure = (
            f"{what}; {kept}. A smaller config.optimizer.learning_rate or clip_norm, "
            f"or more warmup_steps, may help."
        )


class Trainer:
    """Takes steps, reports and saves, for one model or several; `loop.py` decides when.

    A model starts from the newest of its checkpoints, or else from `source` or its
    seed. Models may be at different steps if a run was killed while it saved: models
    that are behind catch up. A model that fails stays behind; the others continue.
    """

    def __init__(
        self,
        opened: Sequence[starting.Opened],
        task: tasks.Task,
        placement: devices.Placement,
        source: starting.Start | None = None,
    ):
        began = time.perf_counter()
        config = opened[0].config
        training = config.training
        self.config, self.task, self.placement = config, task, placement
        self._max_skips = training.max_skips if training.non_finite == "skip" else 0
        model = folders.make_model(config.model, task, placement)
        transformation = optimizers.make(config.optimizer, steps=training.steps)
        dispatch = stepping.make_dispatch(
            optimizers.without_frozen(model, config.optimizer),
            task,
            transformation,
            batch_size=training.batch_size,
            placement=placement,
            max_steps=training.steps_per_dispatch,
            max_skips=self._max_skips,
        )
        evaluate = evaluation.make_evaluation(
            model,
            task,
            num_examples=training.evaluation_examples,
            batch_size=training.batch_size,
            placement=placement,
        )
        seeds = [np.uint32(run.config.seed) for run in opened]
        self.train_data = placement.put(task.train_data)
        self._held_out_data = placement.put(task.held_out_data)

        def initial(seed: jax.Array) -> stepping.TrainState:
            return stepping.initial_state(model, transformation, task, seed)

        abstract = jax.eval_shape(initial, seeds[0])
        _check_fits(abstract, len(opened), placement.devices[0].platform)

        def start(run: starting.Opened, seed: np.uint32) -> stepping.TrainState:
            if run.stored.latest() is not None:
                return devices.cluster.first_reads(
                    lambda: _restored(run.stored, abstract, transformation), abstract
                )
            new = jax.device_get(jax.jit(initial)(seed))
            if source is None:
                return new
            params = starting.start_params(source, config, task, new.params)
            return _state_of(params, transformation)

        if source is None and len(opened) == 1 and opened[0].stored.latest() is None:
            self.state = placement.initial_state(initial, seeds[0])  # never on the host
        else:
            starts = [start(run, seed) for run, seed in zip(opened, seeds, strict=True)]
            self.state = placement.put_state(joined(starts))
        self._schedule = jax.jit(
            optimizers.schedule(config.optimizer, steps=training.steps)
        )
        stops = joined([np.int32(0)] * len(seeds))
        self.seeds = joined(seeds)
        self.dispatch = dispatch.lower(
            self.state, self.train_data, self.seeds, stops
        ).compile()
        self._evaluation = evaluate.lower(
            self.state.params, self._held_out_data, self.seeds
        ).compile()
        least_rise = stepping.LEAST_RISE * task.baseline.get("loss", 0.0)
        self.models = [
            Trainee(
                run,
                int(state.step),
                int(state.health.skipped),
                least_rise,
                window=_restored_window(run.stored),
            )
            for run, state in zip(opened, self._numbers(), strict=True)
        ]
        # Of a dispatch, so that an interruption is noticed in time.
        self.affordable_steps = 1
        self.seconds = 0.0  # spent in training steps
        self.moved = list(self.models)  # by the last dispatch; before it, all
        self.console: metrics_log.Console | metrics_log.Silent = metrics_log.Silent()
        self.compile_seconds = time.perf_counter() - began

    @property
    def step(self) -> int:
        """The steps taken by all models that have not failed."""
        return min(model.step for model in self.models if not model.failure)

    def take_steps(self, stop: int) -> None:
        """Trains up to the step `stop`, or as far as one dispatch goes.

        A model fails if more losses or gradients in a row are not finite than the
        config allows; then it is not saved. NonFiniteLossError if no model is left.
        """
        stops = [
            np.int32(model.step if model.failure else max(model.step, stop))
            for model in self.models
        ]
        before = time.perf_counter()
        self.state, report = self.dispatch(
            self.state, self.train_data, self.seeds, joined(stops)
        )
        reports = self._fetch(report)
        seconds = time.perf_counter() - before
        self.seconds += seconds
        results = zip(self.models, reports, self._numbers(), strict=True)
        taken = [
            model.take(x, state, self._max_skips, seconds)
            for model, x, state in results
        ]
        affordable = int(_SECONDS_PER_DISPATCH * max(taken) / seconds)
        self.affordable_steps = max(1, affordable)
        self.moved = [x for x, count in zip(self.models, taken, strict=True) if count]
        self._drop_failed()
        self.console.reach(self.step)

    def report(self, *, is_evaluated: bool) -> None:
        """Logs the means since the last report, with an evaluation if asked.

        Only models that the last dispatch has moved are reported, and saved.
        """
        for model in self.moved:
            model.metrics = model.window.metrics(self.config.training.batch_size)
            model.window = Window()
        if is_evaluated:
            self._evaluate(self.moved)
        learning_rate = float(self._schedule(np.int32(max(self.step - 1, 0))))
        for model in self.moved:
            model.log.report(self.step, model.metrics, learning_rate=learning_rate)
        self.console.report(self.step, [model.metrics for model in self.moved])

    def complete(self) -> None:
        """Evaluates the models that reached this step without a report."""
        if without := [x for x in self.models if not (x.metrics or x.failure)]:
            self._evaluate(without)

    def save(self) -> None:
        """Starts to save checkpoints, with the held-out loss of a report at this step.

        Between reports, it also saves the sums that the next report will need.
        """
        for model, state in self.of_moved(self.state):
            if model.window.numbers["steps"]:
                model.stored.save(self.step, state, window=model.window.numbers)
            else:
                loss = model.metrics.get("held_out_loss")
                model.stored.save(self.step, state, held_out_loss=loss)

    def _evaluate(self, of: Sequence[Trainee]) -> None:
        sums = self._evaluation(self.state.params, self._held_out_data, self.seeds)
        for model, model_sums in zip(self.models, self._fetch(sums), strict=True):
            if model in of:
                model.evaluate(model_sums)
        self._drop_failed()

    def _fetch(self, tree: Any) -> list[Any]:
        """Fetches a program's results for each model, as host arrays."""
        tree, count = self.placement.fetch(tree), np.size(self.seeds)
        if count == 1:
            return [tree]
        return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]

    def _numbers(self) -> list[stepping.TrainState]:
        """Fetches the states of all models, without their arrays, to the host."""
        return self._fetch(self.state._replace(params=(), optimizer_state=()))

    def of_moved(self, tree: Any) -> list[tuple[Trainee, Any]]:
        """Lists the models that the last dispatch has moved, with their host arrays."""
        pairs = zip(self.models, self._fetch(tree), strict=True)
        return [(model, state) for model, state in pairs if model in self.moved]

    def _drop_failed(self) -> None:
        failed = [model for model in self.moved if model.failure]
        self.moved = [model for model in self.moved if not model.failure]
        if all(model.failure for model in self.models):
            several = [f"Seed {x.seed}: {x.failure}" for x in self.models]
            raise NonFiniteLossError(
                "\n".join(several) if len(several) > 1 else self.models[0].failure
            )
        for model in failed:
            _logger.warning(f"Seed {model.seed} has ended: {model.failure}")


def joined(trees: Sequence[Any]) -> Any:
    """Joins trees of numbers, one per model, to an argument of a program."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _restored_window(stored: Any) -> Window:
    """Restores the window at the newest checkpoint, empty if a report ended it."""
    numbers = devices.cluster.first_does(lambda: stored.window())
    window = Window(numbers)
    try:
        window.metrics(1)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        step = stored.latest()
        raise ConfigError(
            f"The checkpoint of step {step} has another window than training wrote."
        ) from None
    return window
