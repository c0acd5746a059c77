"""The `Trainer` of a run: its state, and the programs that train and evaluate it."""

import math
import time
from collections.abc import Sequence

import jax
import numpy as np
import optax

from mha_haiku.core import models
from mha_haiku.training import devices, evaluation, optimizers, tasks, train_step
from mha_haiku.training.runs import checkpoints, configuration, folders

# How long a dispatch may take, so that an interruption is noticed in time.
_SECONDS_PER_DISPATCH = 1.0


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became infinite or NaN; the last checkpoint is good."""


def averages(
    window: Sequence[tuple[train_step.Report, float]], batch_size: int
) -> dict[str, float]:
    """Averages over the steps of dispatches, given with the seconds of each.

    The last gradient's norm is among them; {} without steps.
    """
    if not window:
        return {}
    reports, seconds = zip(*window, strict=True)
    steps = jax.tree.map(lambda *x: np.concatenate(x), *reports)
    # The bits of a sum over all steps do not depend on the dispatches.
    sums = jax.tree.map(lambda x: float(x.sum(dtype=np.float64)), steps.sums)
    return {
        **evaluation.means(sums),
        "gradient_norm": float(steps.gradient_norm[-1]),
        "examples_per_second": len(steps.finite) * batch_size / sum(seconds),
    }


class Trainer:
    """Takes steps and evaluates; `loop.py` decides when.

    It starts from the arrays of a checkpoint, or else from the seed.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        task: tasks.Task,
        placement: devices.Placement,
        *,
        arrays: checkpoints.Arrays | None = None,
        model: models.Model | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ):
        began = time.perf_counter()
        training = config.training
        self.config, self.task, self.placement = config, task, placement
        model = model or folders.make_model(config.model, task, placement)
        transformation = optimizers.make(
            config.optimizer, steps=training.steps, own=optimizer
        )
        dispatch = train_step.make_dispatch(
            optimizers.without_frozen(model, config.optimizer),
            task,
            transformation,
            batch_size=training.batch_size,
            placement=placement,
            max_steps=training.steps_per_dispatch,
        )
        evaluate = evaluation.make_evaluation(
            model,
            task,
            num_examples=training.evaluation_examples,
            batch_size=training.batch_size,
            placement=placement,
        )
        self.seed = np.uint32(config.seed)
        self.train_data = placement.put(task.train_data)
        self._held_out_data = placement.put(task.held_out_data)

        def initial(seed: jax.Array) -> train_step.TrainState:
            return train_step.initial_state(model, transformation, task, seed)

        abstract = jax.eval_shape(initial, self.seed)
        self.num_params = sum(x.size for x in jax.tree.leaves(abstract.params))
        if arrays is not None:
            has_state = any(name.startswith(".optimizer_state") for name in arrays)
            kind = train_step.TrainState if has_state else train_step.Parameters
            like = kind(*abstract[: len(kind._fields)])
            state = checkpoints.restored(arrays, like)
            if not has_state:  # of an imported or a pruned model
                begun = train_step.state_of(state.params, transformation)
                state = jax.tree.map(np.asarray, begun)._replace(step=state.step)
            self.state = placement.put_state(state)
        else:
            self.state = placement.initial_state(initial, self.seed)  # not on the host
        self._schedule = jax.jit(
            optimizers.schedule(config.optimizer, steps=training.steps)
        )
        self.dispatch = dispatch.lower(
            self.state, self.train_data, self.seed, np.int32(0)
        ).compile()
        self._evaluation = evaluate.lower(
            self.state.params, self._held_out_data, self.seed
        ).compile()
        self.step = int(placement.fetch(self.state.step))
        # The dispatches since the last report, with the seconds of each.
        self.window: list[tuple[train_step.Report, float]] = []
        self.failure = ""  # says what is not finite
        # Of a dispatch, so that an interruption is noticed in time.
        self.affordable_steps = 1
        self.seconds = 0.0  # spent in training steps
        self.compile_seconds = time.perf_counter() - began

    def take_steps(self, stop: int) -> None:
        """Trains up to the step `stop`, or as far as one dispatch goes.

        `failure` says so if the last loss or gradient is not finite.
        """
        before = time.perf_counter()
        self.state, report = self.dispatch(
            self.state, self.train_data, self.seed, np.int32(stop)
        )
        report = self.placement.fetch(report)
        seconds = time.perf_counter() - before
        self.seconds += seconds
        first, self.step = self.step, int(self.placement.fetch(self.state.step))
        steps = self.step - first
        self.affordable_steps = max(1, int(_SECONDS_PER_DISPATCH * steps / seconds))
        report = jax.tree.map(lambda x: x[:steps], report)
        self.window.append((report, seconds))
        if not report.finite[-1]:
            what = "gradient" if math.isfinite(report.sums.loss[-1]) else "loss"
            self.failure = f"The {what} is not finite at step {self.step}"

    def report(self, *, is_evaluated: bool) -> dict[str, float]:
        """Averages over the steps since the last report, with an evaluation if asked.

        Opens a new window. `failure` says so if the held-out loss is not finite.
        """
        metrics = averages(self.window, self.config.training.batch_size)
        self.window.clear()
        if is_evaluated:
            sums = self._evaluation(self.state.params, self._held_out_data, self.seed)
            means = evaluation.means(self.placement.fetch(sums))
            if not math.isfinite(means["loss"]):
                self.failure = f"The held-out loss is not finite at step {self.step}"
                return metrics
            metrics |= {f"held_out_{name}": value for name, value in means.items()}
        return metrics

    def learning_rate(self) -> float | None:
        """Computes the learning rate of the last step, if the config says it."""
        if self.config.optimizer.name == "optax":
            return None
        return float(self._schedule(np.int32(max(self.step - 1, 0))))
