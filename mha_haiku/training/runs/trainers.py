"""The `Trainer` of a run: its state, and the programs that train and evaluate it."""

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from mha_haiku.core import checks, models
from mha_haiku.training import (
    devices,
    evaluation,
    losses,
    optimizers,
    tasks,
    train_step,
)
from mha_haiku.training.runs import checkpoints, configuration, folders

# How long a dispatch may take, so that an interruption is noticed in time.
_SECONDS_PER_DISPATCH = 1.0


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became infinite or NaN; the last checkpoint is good."""


class Window:
    """Sums over the steps since the last report.

    The steps are added one by one in float64, so the bits depend neither on the
    division into dispatches nor on interruptions.
    """

    def __init__(self, numbers: Mapping[str, float] | None = None):
        """Continues from the `numbers` of another window, or opens a new one."""
        self.numbers = dict(numbers or {"steps": 0, "seconds": 0.0})

    def add(self, report: train_step.Report, seconds: float) -> None:
        numbers = self.numbers
        numbers["steps"] += len(report.gradient_norm)
        numbers["seconds"] += seconds
        for name, values in report.sums._asdict().items():
            if values is not None:
                total = numbers.get(name, 0.0)
                for value in values.tolist():  # `sum` may be more precise
                    total += value
                numbers[name] = total
        numbers["gradient_norm"] = float(report.gradient_norm[-1])

    def metrics(self, batch_size: int) -> dict[str, float]:
        """Averages over the steps, with the last gradient's norm; {} without steps."""
        numbers = self.numbers
        if not numbers["steps"]:
            return {}
        names = [name for name in losses.Sums._fields if name in numbers]
        sums: dict[str, Any] = {name: numbers[name] for name in names}
        means = evaluation.means(losses.Sums(**sums))
        rate = numbers["steps"] * batch_size / numbers["seconds"]
        return {
            **means,
            "gradient_norm": numbers["gradient_norm"],
            "examples_per_second": rate,
        }


class Trainer:
    """Takes steps and evaluates; `loop.py` decides when.

    It starts from the arrays of a checkpoint, or else from the seed, and continues the
    sums of `window`. A model and an optimizer that a config cannot describe are passed.
    """

    def __init__(
        self,
        config: configuration.RunConfig,
        task: tasks.Task,
        placement: devices.Placement,
        *,
        arrays: checkpoints.Arrays | None = None,
        window: Mapping[str, float] | None = None,
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
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
        if size > (memory := checks.memory() * jax.process_count()):
            raise checks.ConfigError(
                f"config.model must fit into {memory / 2**30:.3g} GiB of memory; its "
                f"parameters and the optimizer's state take {size / 2**30:.3g} GiB."
            )
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
        self.window = Window(window)
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
        taken = self.step - first
        self.affordable_steps = max(1, int(_SECONDS_PER_DISPATCH * taken / seconds))
        report = jax.tree.map(lambda x: x[:taken], report)
        self.window.add(report, seconds)
        if not report.finite[-1]:
            what = "gradient" if math.isfinite(report.sums.loss[-1]) else "loss"
            self.failure = f"The {what} is not finite at step {self.step}"

    def report(self, *, is_evaluated: bool) -> dict[str, float]:
        """Averages over the steps since the last report, with an evaluation if asked.

        Opens a new window. `failure` says so if the held-out loss is not finite.
        """
        metrics = self.window.metrics(self.config.training.batch_size)
        self.window = Window()
        if is_evaluated:
            sums = self._evaluation(self.state.params, self._held_out_data, self.seed)
            means = evaluation.means(self.placement.fetch(sums))
            if not math.isfinite(means["loss"]):
                self.failure = f"The held-out loss is not finite at step {self.step}"
                return metrics
            metrics |= {f"held_out_{name}": value for name, value in means.items()}
        if "accuracy" not in self.task.metrics:
            metrics = {x: y for x, y in metrics.items() if not x.endswith("accuracy")}
        return metrics

    def learning_rate(self) -> float | None:
        """Computes the learning rate of the last step, if the config says it."""
        if self.config.optimizer.name == "optax":
            return None
        return float(self._schedule(np.int32(max(self.step - 1, 0))))
