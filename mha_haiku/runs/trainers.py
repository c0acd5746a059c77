"""The `Trainer` of a run: its state, compiled programs, reports and checkpoints."""

import math
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from mha_haiku import devices, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.runs import checkpoints, metrics_log, warm_start
from mha_haiku.training import evaluation, optimizers, stepping

# How long a dispatch may take, so that an interruption is noticed in time.
_SECONDS_PER_DISPATCH = 1.0


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became infinite or NaN; the last checkpoint is good."""


class Programs(NamedTuple):
    """The compiled programs, with their arguments that never change."""

    placement: devices.Placement
    learning_rate: Any  # from the number of a step, counted from 0; on the host
    dispatch: Any  # see `stepping.make_dispatch`
    evaluate: Any  # see `evaluation.make_evaluation`
    train_data: Any
    held_out_data: Any
    seed: np.uint32


def prepare(
    config: ml_collections.ConfigDict,
    task: tasks.Task,
    model: models.Model,
    stored: checkpoints.Checkpoints,
    placement: devices.Placement,
    source: warm_start.Source | None = None,
) -> tuple[stepping.TrainState, Programs]:
    """Returns the state to start from, on its devices, and the compiled programs.

    The state is the newest of `stored`, or a new one, with the parameters of `source`
    if that is given. Where only parameters are stored, the optimizer starts anew.
    """
    training = config.training
    transformation = optimizers.make(config.optimizer, steps=training.steps)
    dispatch = stepping.make_dispatch(
        optimizers.without_frozen(model, config.optimizer),
        task,
        transformation,
        batch_size=training.batch_size,
        placement=placement,
        max_steps=training.steps_per_dispatch,
        max_skips=max_skips(training),
    )
    evaluate = evaluation.make_evaluation(
        model,
        task,
        num_examples=training.evaluation_examples,
        batch_size=training.batch_size,
        placement=placement,
    )
    seed = np.uint32(config.seed)
    train_data = placement.put(task.train_data)
    held_out_data = placement.put(task.held_out_data)

    def initial(seed):
        return stepping.initial_state(model, transformation, task, seed)

    abstract = jax.eval_shape(initial, seed)
    _check_fits(abstract, placement.devices)
    if stored.latest() is None and source is None:
        state = placement.initial_state(initial, seed)
    elif stored.latest() is None:
        new = jax.device_get(jax.jit(initial)(seed).params)
        params = warm_start.params(source, config, task, new)
        state = placement.put_state(_state_of(params, transformation))
    else:
        state = devices.cluster.first_reads(
            lambda: _restored(stored, abstract, transformation), abstract
        )
        state = placement.put_state(state)
    schedule = jax.jit(optimizers.schedule(config.optimizer, steps=training.steps))
    programs = Programs(
        placement=placement,
        learning_rate=lambda step: float(schedule(np.int32(step))),
        dispatch=dispatch.lower(state, train_data, seed, np.int32(0)).compile(),
        evaluate=evaluate.lower(state.params, held_out_data, seed).compile(),
        train_data=train_data,
        held_out_data=held_out_data,
        seed=seed,
    )
    return state, programs


def _restored(stored, abstract, transformation) -> stepping.TrainState:
    """Returns the newest state, as host arrays."""
    alone = stepping.Parameters(abstract.step, abstract.params)
    if stored.fields() != {f".{field}" for field in alone._fields}:
        return stored.restore(abstract)
    alone = stored.restore(alone)
    return _state_of(alone.params, transformation)._replace(step=alone.step)


def _state_of(params, transformation) -> stepping.TrainState:
    """Returns the state before the first step, with these parameters, on the host."""
    return jax.tree.map(np.asarray, stepping.state_of(params, transformation))


def _check_fits(abstract: Any, on: Sequence[jax.Device]) -> None:
    """Raises ConfigError if a state is larger than the memory of its devices."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    if on[0].platform == "cpu":  # whose devices share the memory of a machine
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = pages * jax.process_count()
    else:
        limits = (each.memory_stats() or {} for each in jax.local_devices())
        memory = sum(x.get("bytes_limit", math.inf) for x in limits)
        memory *= jax.process_count()
    if size > memory:
        raise ConfigError(
            f"config.model and config.optimizer must fit into {memory / 2**30:.3g} GiB "
            "of memory; the parameters and what the optimizer keeps of them take "
            f"{size / 2**30:.3g} GiB."
        )


def max_skips(training: ml_collections.ConfigDict) -> int:
    """Returns how many steps in a row may be not finite; see `config.training`."""
    return training.max_skips if training.non_finite == "skip" else 0


class Trainer:
    """Takes steps, reports and saves; `loop.py` decides when."""

    def __init__(
        self,
        state: stepping.TrainState,
        programs: Programs,
        *,
        training: ml_collections.ConfigDict,
        stored: checkpoints.Checkpoints,
        log: metrics_log.MetricsLog,
    ):
        self._placement = programs.placement
        self.step = int(self._placement.fetch(state.step))
        self.skipped = int(self._placement.fetch(state.health.skipped))
        # How many steps a dispatch may take, so that an interruption is noticed in
        # time.
        self.affordable_steps = 1
        self.metrics: dict[str, float] = {}  # of the last report
        self.seconds = 0.0  # spent in training steps
        self._state = state
        self._programs = programs
        self._batch_size = training.batch_size
        self._max_skips = max_skips(training)
        self._stored = stored
        self._log = log
        self._open_window()

    def take_steps(self, stop: int) -> None:
        """Trains up to the step `stop`, or as far as one dispatch goes.

        Raises:
          NonFiniteLossError: If more losses or gradients in a row are not finite than
            the config allows; nothing is saved then.
        """
        first, before = self.step, time.perf_counter()
        self._state, report = self._programs.dispatch(
            self._state, self._programs.train_data, self._programs.seed, np.int32(stop)
        )
        report = self._placement.fetch(report)
        seconds = time.perf_counter() - before
        self.seconds += seconds
        self.step = int(self._placement.fetch(self._state.step))
        taken = self.step - first
        self.affordable_steps = max(1, int(_SECONDS_PER_DISPATCH * taken / seconds))
        self._window.append(jax.tree.map(lambda x: x[:taken], report))
        events = metrics_log.events_of_steps(first, self._window[-1], self.skipped)
        for event in events:
            self._log.event(event)
        health = self._placement.fetch(self._state.health)
        self.skipped = int(health.skipped)
        if health.skipped_in_a_row > self._max_skips:
            what = f"The {events[-1]['what']} is not finite at step {self.step}"
            if self._max_skips:
                what += f", as in all of the last {health.skipped_in_a_row} steps"
            self._refuse(what)
        self._log.advance(self.step)

    def report(self, *, is_evaluated: bool) -> None:
        """Logs the means since the last report, with an evaluation if asked.

        The learning rate that is logged is that of the last step.
        """
        self.metrics = {}
        if self.step > self._window_start[0]:
            examples = (self.step - self._window_start[0]) * self._batch_size
            seconds = self.seconds - self._window_start[1]
            self.metrics = {
                **_means(self._window),
                "examples_per_second": examples / seconds,
            }
        if is_evaluated:
            self.evaluate()
        learning_rate = self._programs.learning_rate(max(self.step - 1, 0))
        self._log.report(self.step, self.metrics, learning_rate=learning_rate)
        self._open_window()

    def evaluate(self) -> None:
        """Adds the held-out loss and accuracy to `metrics`.

        Raises:
          NonFiniteLossError: If the loss is not finite.
        """
        sums = self._programs.evaluate(
            self._state.params, self._programs.held_out_data, self._programs.seed
        )
        means = evaluation.means(self._placement.fetch(sums))
        if not math.isfinite(means["loss"]):
            self._refuse(f"The held-out loss is not finite at step {self.step}")
        self.metrics |= {f"held_out_{name}": value for name, value in means.items()}

    def params(self) -> Any:
        """Returns the parameters as host arrays."""
        return self._placement.fetch(self._state.params)

    def save(self) -> None:
        """Starts to save a checkpoint, with the held-out loss if the report has it."""
        self._stored.save(
            self.step,
            self._placement.fetch(self._state),
            held_out_loss=self.metrics.get("held_out_loss"),
        )

    def _open_window(self) -> None:
        self._window_start = (self.step, self.seconds)
        self._window: list[stepping.Report] = []

    def _refuse(self, what) -> None:
        good = self._stored.latest()
        kept = "no checkpoint has been saved"
        if good is not None:
            kept = f"the last good checkpoint is of step {good}"
        raise NonFiniteLossError(
            f"{what}; {kept}. A smaller config.optimizer.learning_rate or clip_norm, "
            f"or more warmup_steps, may help."
        )


def _means(window) -> dict[str, float]:
    """Returns the means over a window's steps, and the last norm of the gradient.

    They are computed from the numbers of each step, so that their bits do not depend on
    how steps are divided into dispatches. If no step is finite there are none.
    """
    steps = jax.tree.map(lambda *parts: np.concatenate(parts), *window)
    finite = steps.finite
    if not finite.any():
        return {}
    sums = jax.tree.map(lambda x: x[finite].sum(dtype=np.float64), steps.sums)
    norm = float(steps.gradient_norm[finite][-1])
    return {**evaluation.means(sums), "gradient_norm": norm}
