"""Evaluation on a fixed set of held-out examples, with their own key and data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import models
from mha_haiku.training import devices, losses, tasks, train_step


def held_out_batch(
    task: tasks.Task, seed: int | jax.Array, data: Any, indices: jax.Array | np.ndarray
) -> tasks.Example:
    """Makes held-out examples; index i is the same example in every evaluation."""
    key = train_step.stream(seed, "held_out")
    return tasks.batch(task, key, data, indices)


def make_evaluation(
    model: models.Model,
    task: tasks.Task,
    *,
    num_examples: int,
    batch_size: int,
    placement: devices.Placement,
) -> Callable[[Any, Any, np.uint32], losses.Sums]:
    """Makes the program that evaluates on the first `num_examples` held-out examples.

    Surplus examples of the last batch get weight 0, so that the result does not depend
    on the number of devices. `evaluate(params, data, seed)`, with what
    `placement.put_state` and `put` return, returns the sums on every device.
    """
    num_batches = -(-num_examples // batch_size)

    def evaluate(params: Any, data: Any, seed: jax.Array) -> losses.Sums:
        def add_batch(index: jax.Array, total: losses.Sums) -> losses.Sums:
            def make(places: jax.Array) -> tasks.Example:
                indices = index * batch_size + places
                example = held_out_batch(task, seed, data, indices)
                counts = (indices < num_examples).reshape(
                    indices.shape + (1,) * (example.weights.ndim - 1)
                )
                weights = jnp.where(counts, example.weights, 0)
                return example._replace(weights=weights)

            example = placement.batch(batch_size, make)
            sums = train_step.loss_sums(
                model, task, params, None, example, is_training=False
            )
            return jax.tree.map(jnp.add, total, sums)

        init = losses.zeros(counts_exact=task.counts_exact)
        total = jax.lax.fori_loop(0, num_batches, add_batch, init)
        return placement.total(total)

    return placement.program(evaluate, num_scalars=1, returns_state=False)


def means(sums: losses.Sums) -> dict[str, float]:
    """Averages loss (nats per target), accuracy and, where counted, `exact_match`."""
    parts: dict[str, tuple[Any, Any]] = {
        "loss": (sums.loss, sums.weight),
        "accuracy": (sums.correct, sums.weight),
    }
    if sums.exact is not None:
        parts["exact_match"] = sums.exact, sums.examples
    return {
        name: float(total) / float(count) if count else float("nan")
        for name, (total, count) in parts.items()
        if name != "accuracy" or not np.isnan(total)  # of another loss
    }
