"""The training step: a pure function of the state, the data and the seed.

One dispatch runs any number of steps in one compiled program. Everything random is
derived from (seed, step, index of the example), so resuming needs no state except
`TrainState`, and the global batch is the same on any number of devices.

Dimensions: N steps in one dispatch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mha_haiku.core import models
from mha_haiku.training import devices, losses, tasks

_STREAMS = ("init", "data", "dropout", "held_out")


class TrainState(NamedTuple):
    """The content of a checkpoint of a run in training."""

    step: Array  # [] int32, steps taken
    params: Any
    optimizer_state: optax.OptState


class Parameters(NamedTuple):
    """The content of a checkpoint without training state; a prefix of `TrainState`."""

    step: Array | np.int32
    params: Any


class Report(NamedTuple):
    """Numbers per step of a dispatch; 0 and True for steps that were not taken."""

    sums: losses.Sums  # [N] each, over the step's examples
    gradient_norm: Array  # [N] float32, before clipping
    finite: Array  # [N] bool, of loss and gradient


def stream(seed: int | Array, name: str) -> Array:
    """Makes the PRNG key of one of the independent `_STREAMS`."""
    key = jax.random.key(jnp.asarray(seed, jnp.uint32))
    return jax.random.fold_in(key, _STREAMS.index(name))


def initial_state(
    model: models.Model,
    optimizer: optax.GradientTransformation,
    task: tasks.Task,
    seed: int | Array,
) -> TrainState:
    """Initializes the state before the first step; under jit or `eval_shape`."""
    key = stream(seed, "init")
    size = () if task.feature_size is None else (task.feature_size,)
    dtype = jnp.float32 if size else jnp.int32
    inputs, decoder = jnp.ones((1, task.sequence_length, *size), dtype), {}
    if task.target_length is not None:
        decoder["decoder_inputs"] = jnp.ones((1, task.target_length), jnp.int32)
    return state_of(model.init(key, inputs, **decoder), optimizer)


def state_of(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Makes the state before the first step, with these parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def loss_sums(
    model: models.Model,
    task: tasks.Task,
    params: Any,
    rng: Array | None,
    example: tasks.Example,
    *,
    is_training: bool,
) -> losses.Sums:
    """Sums loss, right answers and weights over a batch of examples."""
    arguments = example.model_inputs()
    inputs = arguments.pop("inputs")
    output = model.apply(params, rng, inputs, **arguments, is_training=is_training)
    logits: Any = output.logits  # never None: see `configuration.validate_for_task`
    if model.loss is not None:
        value = model.loss(output, example).astype(jnp.float32)
        weights = example.weights.reshape(len(example.weights), -1).sum(1)
        return losses.Sums((value * weights).sum(), jnp.float32(jnp.nan), weights.sum())
    correct, targets = task.correct(logits, example), (example.targets, example.weights)
    return losses.sums(logits, *targets, correct, counts_exact=task.counts_exact)


def gradients(
    model: models.Model,
    task: tasks.Task,
    params: Any,
    data: Any,
    *,
    seed: int | Array,
    step: Array,
    batch_size: int,
    placement: devices.Placement,
) -> tuple[Any, losses.Sums]:
    """Computes the gradient of a global batch's mean loss, and its sums, in a program.

    Both are summed over all devices.
    """
    data_key = jax.random.fold_in(stream(seed, "data"), step)
    example = placement.batch(
        batch_size, lambda indices: tasks.batch(task, data_key, data, indices)
    )
    dropout_key = jax.random.fold_in(stream(seed, "dropout"), step)
    dropout_key = placement.own_key(dropout_key)
    # The weights do not depend on the parameters: dividing inside the loss costs one
    # scalar sum over devices and saves a pass over the gradient.
    weight = placement.total(example.weights.sum())
    scale = jnp.where(weight > 0, 1 / weight, 0)

    def mean_loss(params: Any):
        sums = loss_sums(model, task, params, dropout_key, example, is_training=True)
        return sums.loss * scale, sums

    gradient, sums = jax.grad(mean_loss, has_aux=True)(params)
    return placement.total((gradient, sums))


def make_dispatch(
    model: models.Model,
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    placement: devices.Placement,
    max_steps: int,
) -> Callable[[TrainState, Any, np.uint32, np.int32], tuple[TrainState, Report]]:
    """Makes the program `dispatch(state, data, seed, stop)`, which trains to `stop`.

    State (donated) and data are what `placement.put_state` and `put` return. A dispatch
    takes at most `max_steps` steps, and ends after one whose loss or gradient is not
    finite; the bits do not depend on how steps are divided.
    """

    def take_step(state: TrainState, data: Any, seed: Array):
        gradient, sums = gradients(
            model,
            task,
            state.params,
            data,
            seed=seed,
            step=state.step,
            batch_size=batch_size,
            placement=placement,
        )
        norm = optax.tree.norm(gradient)
        updates, optimizer_state = optimizer.update(
            gradient, state.optimizer_state, state.params
        )
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        params = optax.apply_updates(state.params, updates)
        state = TrainState(state.step + 1, params, optimizer_state)
        return state, Report(sums, norm, finite)

    def dispatch(state: TrainState, data: Any, seed: Array, stop: Array):
        def continues(carry: tuple[Array, TrainState, Report]):
            index, state, reports = carry
            is_due = (index < max_steps) & (state.step < stop)
            return is_due & reports.finite.all()

        def take(carry: tuple[Array, TrainState, Report]):
            index, state, reports = carry
            state, report = take_step(state, data, seed)
            reports = jax.tree.map(lambda x, new: x.at[index].set(new), reports, report)
            return index + 1, state, reports

        sums = losses.zeros((max_steps,), counts_exact=task.counts_exact)
        norms, finite = jnp.zeros(max_steps, jnp.float32), jnp.ones(max_steps, bool)
        init = Report(sums, norms, finite)
        start = jnp.zeros((), jnp.int32)
        _, state, reports = jax.lax.while_loop(continues, take, (start, state, init))
        return state, reports

    return placement.program(dispatch, num_scalars=2, returns_state=True)
