"""Held-out evaluation: exactly these examples, on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices, tasks
from mha_haiku.training import evaluation, losses, train_step
from tests import everyday

SEED = np.uint32(4)


def _evaluate(model, task, params, *, num_examples, batch_size, count):
    placement = devices.Replicas(jax.local_devices()[:count])
    program = evaluation.make_evaluation(
        model,
        task,
        num_examples=num_examples,
        batch_size=batch_size,
        placement=placement,
    )
    params, data = placement.put((params, task.held_out_data))
    return placement.fetch(program(params, data, SEED))


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "count"),
    everyday.those([(11, 4, 1), (12, 8, 4), (12, 20, 2)], (12, 20, 2)),
)
def test_exactly_the_first_examples_count(
    task, make_model, num_examples, batch_size, count
):
    model = make_model(dropout_rate=0.5)  # which evaluation leaves out
    params = model.init(jax.random.key(1), None)
    sums = _evaluate(
        model,
        task,
        params,
        num_examples=num_examples,
        batch_size=batch_size,
        count=count,
    )
    key = train_step.stream(SEED, "held_out")
    indices = jnp.arange(num_examples)
    example = tasks.batch(task, key, task.held_out_data, indices)
    logits = model.apply(params, None, example.inputs, is_training=False).logits
    wanted = losses.sums(
        logits, example.targets, example.weights, logits.argmax(-1) == example.targets
    )
    assert sums.weight == wanted.weight
    assert sums.correct == wanted.correct
    np.testing.assert_allclose(sums.loss, wanted.loss, rtol=1e-6)


@pytest.mark.slow
def test_held_out_examples_are_not_those_of_training(task):
    indices = jnp.arange(32)
    held_out = evaluation.held_out_batch(task, SEED, task.held_out_data, indices)
    for at in range(3):
        key = jax.random.fold_in(train_step.stream(SEED, "data"), at)
        trained = tasks.batch(task, key, task.train_data, indices)
        assert not np.array_equal(held_out.inputs, trained.inputs)


def test_means_are_per_target():
    means = evaluation.means(losses.Sums(np.float32(6), np.float32(1), np.float32(4)))
    assert means == {"loss": 1.5, "accuracy": 0.25}
    nothing = evaluation.means(losses.Sums(np.float32(0), np.float32(0), np.float32(0)))
    assert np.isnan(nothing["loss"]) and np.isnan(nothing["accuracy"])
