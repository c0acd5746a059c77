"""A run on its way: its state, the compiled programs, what it reports and saves."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from mha_haiku import checkpoints, models, tasks
from mha_haiku import devices as device_placement
from mha_haiku.training import evaluate, loss, metrics_log, optimizer
from mha_haiku.training import step as training_step


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became infinite or NaN; the last checkpoint is good."""


class Programs(NamedTuple):
    """What was compiled, with the arguments that never change."""

    dispatch: Any  # see `step.make_dispatch`
    evaluate: Any  # see `evaluate.make_evaluation`
    train_data: Any
    held_out_data: Any
    seed: np.uint32


def prepare(
    config: ml_collections.ConfigDict,
    task: tasks.Task,
    model: models.Model,
    stored: checkpoints.Checkpoints,
    devices: Sequence[jax.Device],
) -> tuple[training_step.TrainState, Programs]:
    """Returns the state to start from, replicated, and the compiled programs.

    The state is the newest of `stored`, or a new one.
    """
    training = config.training
    transformation = optimizer.make(config.optimizer, steps=training.steps)
    dispatch = training_step.make_dispatch(
        model, task, transformation, batch_size=training.batch_size, devices=devices
    )
    evaluation = evaluate.make_evaluation(
        model,
        task,
        num_examples=training.evaluation_examples,
        batch_size=training.batch_size,
        devices=devices,
    )
    seed = np.uint32(config.seed)
    train_data = device_placement.replicate(task.train_data, devices)
    held_out_data = device_placement.replicate(task.held_out_data, devices)

    def initial(seed):
        return training_step.initial_state(model, transformation, task, seed)

    if stored.latest() is None:
        state = jax.jit(initial)(seed)
    else:
        state = stored.restore(jax.eval_shape(initial, seed))
    state = device_placement.replicate(state, devices)
    programs = Programs(
        dispatch=dispatch.lower(state, train_data, seed, np.int32(0)).compile(),
        evaluate=evaluation.lower(state.params, held_out_data, seed).compile(),
        train_data=train_data,
        held_out_data=held_out_data,
        seed=seed,
    )
    return state, programs


class Progress:
    """Where a run is. Nothing here decides when: see `loop.py`."""

    def __init__(
        self,
        state: training_step.TrainState,
        programs: Programs,
        *,
        batch_size: int,
        stored: checkpoints.Checkpoints,
        log: metrics_log.MetricsLog,
    ):
        self.step = int(device_placement.unreplicate(state.step))
        self.metrics: dict[str, float] = {}  # of the last report
        self.seconds = 0.0  # spent in training steps
        self._state = state
        self._programs = programs
        self._batch_size = batch_size
        self._stored = stored
        self._log = log
        self._open_window()

    def take_steps(self, stop: int) -> None:
        """Trains up to the step `stop`.

        Raises:
          NonFiniteLossError: If a loss or gradient is not; nothing is saved then.
        """
        before = time.perf_counter()
        self._state, report = self._programs.dispatch(
            self._state, self._programs.train_data, self._programs.seed, np.int32(stop)
        )
        report = device_placement.unreplicate(report)
        self.seconds += time.perf_counter() - before
        self.step = int(device_placement.unreplicate(self._state.step))
        if not report.finite:
            what = "gradient" if math.isfinite(report.sums.loss) else "loss"
            self._refuse(f"The {what} is not finite at step {self.step}")
        self._sums = jax.tree.map(np.add, self._sums, report.sums)
        self._gradient_norm = float(report.gradient_norm)
        self._log.advance(self.step)

    def report(self, *, is_evaluated: bool) -> None:
        """Logs the means since the last report, with an evaluation if asked."""
        self.metrics = {}
        if self.step > self._window_start[0]:
            examples = (self.step - self._window_start[0]) * self._batch_size
            seconds = self.seconds - self._window_start[1]
            self.metrics = {
                **evaluate.means(self._sums),
                "gradient_norm": self._gradient_norm,
                "examples_per_second": examples / seconds,
            }
        if is_evaluated:
            self.evaluate()
        self._log.report(self.step, self.metrics)
        self._open_window()

    def evaluate(self) -> None:
        """Adds the held-out loss and accuracy to `metrics`.

        Raises:
          NonFiniteLossError: If the loss is not finite.
        """
        sums = self._programs.evaluate(
            self._state.params, self._programs.held_out_data, self._programs.seed
        )
        means = evaluate.means(device_placement.unreplicate(sums))
        if not math.isfinite(means["loss"]):
            self._refuse(f"The held-out loss is not finite at step {self.step}")
        self.metrics |= {f"held_out_{name}": value for name, value in means.items()}

    def save(self) -> None:
        """Starts to save a checkpoint, with the held-out loss if the report has it."""
        self._stored.save(
            self.step,
            device_placement.unreplicate(self._state),
            held_out_loss=self.metrics.get("held_out_loss"),
        )

    def _open_window(self) -> None:
        zero = np.float64(0)
        self._window_start = (self.step, self.seconds)
        self._sums = loss.Sums(zero, zero, zero)
        self._gradient_norm = 0.0

    def _refuse(self, what) -> None:
        good = self._stored.latest()
        kept = "no checkpoint has been saved"
        if good is not None:
            kept = f"the last good checkpoint is of step {good}"
        raise NonFiniteLossError(
            f"{what}; {kept}. A smaller config.optimizer.learning_rate or clip_norm, "
            f"or more warmup_steps, may help."
        )
