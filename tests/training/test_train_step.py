"""The step: the same on any number of devices, by dispatches of any size."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mha_haiku import devices, tasks
from mha_haiku.training import train_step

SEED = np.uint32(11)


def _compiled_gradients(model, task, params, count, batch_size):
    """Returns a function from a step to its gradient and sums, as host arrays."""
    placement = devices.Replicas(jax.local_devices()[:count])

    def gradients(params, data, at):
        return train_step.gradients(
            model,
            task,
            params,
            data,
            seed=SEED,
            step=at,
            batch_size=batch_size,
            placement=placement,
        )

    mapped = placement.program(gradients, num_scalars=1, returns_state=False)
    params, data = placement.put((params, task.train_data))

    def at_step(at=5):
        results = mapped(params, data, np.int32(at))
        for leaf in jax.tree.leaves(results):
            np.testing.assert_array_equal(leaf[0], leaf[-1])
        return placement.fetch(results)

    return at_step


@pytest.mark.slow
def test_gradient_is_that_of_the_mean_loss_over_the_weights(task, make_model):
    model = make_model()
    params = model.init(jax.random.key(0), None)
    key = jax.random.fold_in(train_step.stream(SEED, "data"), 5)
    example = tasks.batch(task, key, task.train_data, jnp.arange(8))

    def mean_loss(params):
        logits = model.apply(params, None, example.inputs, is_training=True).logits
        each = optax.softmax_cross_entropy_with_integer_labels(logits, example.targets)
        return (each * example.weights).sum() / example.weights.sum()

    value, wanted = jax.value_and_grad(mean_loss)(params)
    found, sums = _compiled_gradients(model, task, params, 4, 8)()
    # Devices have different weights: a mean of the devices' means is something else.
    per_device = np.asarray(example.weights).reshape(4, -1).sum(axis=1)
    assert len(set(per_device)) > 1
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-6), found, wanted
    )
    np.testing.assert_allclose(sums.loss / sums.weight, value, rtol=1e-6)
    assert sums.weight == example.weights.sum()


def test_streams_are_independent_and_come_from_the_seed():
    names = ("init", "data", "dropout", "held_out")
    keys = {
        tuple(jax.random.key_data(train_step.stream(SEED, x)).tolist()) for x in names
    }
    assert len(keys) == 4
    other = {
        tuple(jax.random.key_data(train_step.stream(12, x)).tolist()) for x in names
    }
    assert not keys & other
    largest = train_step.stream(2**32 - 1, "data")
    assert largest == train_step.stream(np.uint32(2**32 - 1), "data")


@pytest.mark.slow
def test_devices_and_steps_drop_different_positions(task, make_model):
    model = make_model(dropout_rate=0.5)
    params = model.init(jax.random.key(0), None)

    class SameExample(type(task)):
        def example(self, key, data):
            return super().example(jax.random.key(0), data)

    same = SameExample()
    one = _compiled_gradients(model, same, params, 1, 1)
    table = one(5)[0]["table"]
    assert not np.array_equal(table, one(6)[0]["table"])
    np.testing.assert_array_equal(table, one(5)[0]["table"])
    # With the same dropout everywhere, four devices would just repeat what one does.
    four = _compiled_gradients(model, same, params, 4, 4)
    assert not np.allclose(table, four(5)[0]["table"])


class _Training:
    """A compiled dispatch and a way to run it."""

    def __init__(self, model, task, optimizer, count=2, max_steps=100):
        self.placement = devices.Replicas(jax.local_devices()[:count])
        self.data = self.placement.put(task.train_data)
        initial = train_step.initial_state(model, optimizer, task, SEED)
        self.initial = jax.tree.map(np.asarray, initial)
        dispatch = train_step.make_dispatch(
            model,
            task,
            optimizer,
            batch_size=8,
            placement=self.placement,
            max_steps=max_steps,
        )
        self.dispatch = dispatch.lower(
            self.fresh(), self.data, SEED, np.int32(0)
        ).compile()

    def fresh(self):
        return self.placement.put_state(self.initial)

    def run(self, *stops):
        state, reports, before = self.fresh(), [], 0
        for stop in stops:
            state, report = self.dispatch(state, self.data, SEED, np.int32(stop))
            after = int(self.placement.fetch(state.step))
            report = self.placement.fetch(report)
            reports.append(
                jax.tree.map(lambda x, taken=after - before: x[:taken], report)
            )
            before = after
        return self.placement.fetch(state), reports


@pytest.mark.slow
def test_dispatches_of_any_size_take_the_same_steps(task, make_model):
    training = _Training(make_model(dropout_rate=0.2), task, optax.adam(0.1))
    whole, (report,) = training.run(7)
    short = _Training(make_model(dropout_rate=0.2), task, optax.adam(0.1), max_steps=3)
    parts, reports = short.run(7, 4, 4, 7)
    assert [len(x.finite) for x in reports] == [3, 1, 0, 3]
    assert whole.step == parts.step == 7
    chex.assert_trees_all_equal(whole, parts)
    assert not np.allclose(whole.params["table"], training.initial.params["table"])
    joined = jax.tree.map(lambda *each: np.concatenate(each), *reports)
    chex.assert_trees_all_equal(report, joined)
    assert report.finite.shape == (7,) and report.finite.all()
    assert (report.gradient_norm > 0).all() and (report.sums.weight > 0).all()
    assert len(set(report.sums.loss)) == 7


@pytest.mark.slow
def test_state_is_donated(task, make_model):
    training = _Training(make_model(), task, optax.adam(0.1))
    state = training.fresh()
    training.dispatch(state, training.data, SEED, np.int32(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_steps_end_at_the_first_that_is_not_finite(task, make_model, bad):
    model = make_model()

    def apply(params, *args, **kwargs):
        output = model.apply(params, *args, **kwargs)
        # The update makes the bias pass 2.5 in the third step.
        broken = jnp.where(params["count"].sum() > 2.5, bad, 0)
        return output._replace(logits=output.logits + broken)

    def init(rng, *args):
        return model.init(rng, *args) | {"count": jnp.zeros(1)}

    count = optax.GradientTransformation(
        lambda params: (),
        lambda gradient, state, params: (
            jax.tree.map(jnp.zeros_like, gradient) | {"count": jnp.ones(1)},
            state,
        ),
    )
    counting = model._replace(init=init, apply=apply)
    training = _Training(counting, task, count)
    state, (report,) = training.run(3)
    assert report.finite.all() and state.step == 3
    state, (report,) = training.run(20)
    assert report.finite.tolist() == [True, True, True, False] and state.step == 4
