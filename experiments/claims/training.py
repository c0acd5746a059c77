"""Training of a config with several seeds in one program, in memory."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import models
from mha_haiku.training import devices, evaluation, optimizers, tasks, train_step
from mha_haiku.training.runs import configuration, folders, trainers


class Seed(NamedTuple):
    """A model after its training."""

    params: Any
    history: list[dict[str, Any]]  # reports, as in metrics.jsonl


def train(
    config: configuration.RunConfig,
    seeds: Sequence[int],
    used: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> tuple[tasks.Task, models.Model, list[Seed]]:
    """Trains a model for each seed; returns their common task and model, and each.

    Raises:
      ConfigError: If the config is not valid.
      NonFiniteLossError: If a loss or a gradient is not finite.
    """
    training, steps = config.training, config.training.steps
    configuration.check_devices(config.devices, config.model, training, len(used))
    task = configuration.make_task(config)
    configuration.validate_for_task(config, task)
    model, placement = folders.make_model(config.model, task), _Seeds(used)
    optimizer = optimizers.make(config.optimizer, steps=steps)
    shared: dict[str, Any] = dict(batch_size=training.batch_size, placement=placement)
    trained = optimizers.without_frozen(model, config.optimizer)
    most = training.steps_per_dispatch
    dispatch = train_step.make_dispatch(
        trained, task, optimizer, max_steps=most, **shared
    )
    evaluate = evaluation.make_evaluation(
        model, task, num_examples=training.evaluation_examples, **shared
    )
    initial = jax.jit(lambda x: train_step.initial_state(model, optimizer, task, x))
    numbers: Any = np.array(seeds, np.uint32)
    states = [jax.device_get(initial(seed)) for seed in numbers]
    state = placement.put(jax.tree.map(lambda *x: np.stack(x), *states))
    train_data, held_out = map(placement.put, (task.train_data, task.held_out_data))
    windows: list[list[Any]] = [[] for _ in seeds]
    histories: list[list[dict[str, Any]]] = [[] for _ in seeds]
    first = 0
    while first < steps:
        marks = training.report_every, training.evaluate_every
        due = [(first // every + 1) * every for every in marks]
        last = min(*due, first + most, steps)
        stops: Any = np.full(len(seeds), last, np.int32)
        before = time.perf_counter()
        state, reports = dispatch(state, train_data, numbers, stops)
        reports = placement.fetch(reports)
        seconds = time.perf_counter() - before
        if not reports.finite.all():
            at = numbers[~reports.finite.all(1)].tolist()
            raise trainers.NonFiniteLossError(
                f"The loss or gradient of seeds {at} is not finite before step {last}."
            )
        is_evaluated = last % training.evaluate_every == 0 or last == steps
        sums = None
        if is_evaluated:
            sums = placement.fetch(evaluate(state.params, held_out, numbers))
        for i, (window, history) in enumerate(zip(windows, histories, strict=True)):
            window.append((_of(reports, (i, slice(last - first))), seconds))
            if is_evaluated or last % training.report_every == 0:
                averages = trainers.averages(window, training.batch_size)
                line = {"step": last, **averages}
                means = {} if sums is None else evaluation.means(_of(sums, i))
                line |= {f"held_out_{name}": value for name, value in means.items()}
                history.append(line)
                window.clear()
        first = last
    params = placement.fetch(state.params)
    each = [Seed(_of(params, i), history) for i, history in enumerate(histories)]
    return task, model, each


class _Seeds(devices.Replicas):
    """Replicas with a further axis, of seeds, on all arrays except the data."""

    def program(self, function: Any, *, num_scalars: int, returns_state: bool) -> Any:
        together = jax.vmap(function, in_axes=(0, None, *(0,) * num_scalars))
        return super().program(
            together, num_scalars=num_scalars, returns_state=returns_state
        )


def _of(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda x: x[place], tree)
