"""Hard-concrete gates: their distribution, and what learning them closes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mha_haiku import heads, models, tasks
from mha_haiku.heads import hard_concrete

pytestmark = pytest.mark.usefixtures("quick_compilation")

LOGITS = np.float32([-3, -0.5, 0, 1, 4])


def test_gates_are_open_with_the_probability_that_the_penalty_counts():
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = jax.vmap(lambda key: hard_concrete.sample(jnp.asarray(LOGITS), key))(keys)
    assert drawn.min() == 0 and drawn.max() == 1
    share = np.asarray(drawn > 0).mean(0)
    wanted = hard_concrete.open_probability(jnp.asarray(LOGITS))
    np.testing.assert_allclose(share, wanted, atol=0.012)


def test_gates_are_the_stretched_concrete_of_the_paper():
    """Equations 10 and 11 in float64, from the same uniform numbers."""
    key = jax.random.key(1)
    found = hard_concrete.sample(jnp.asarray(LOGITS), key)
    tiny = np.finfo(np.float32).tiny
    u = np.float64(jax.random.uniform(key, LOGITS.shape, minval=tiny))
    s = 1 / (1 + np.exp(-(np.log(u) - np.log(1 - u) + LOGITS) / (2 / 3)))
    np.testing.assert_allclose(found, np.clip(s * 1.2 - 0.1, 0, 1), atol=1e-5)


def test_settled_gates_close_and_open_exactly():
    found = np.asarray(hard_concrete.settled(jnp.asarray(np.float32([-9, 0, 9]))))
    np.testing.assert_allclose(found, [0, 0.5, 1])


def test_penalty_has_a_slope_everywhere():
    slopes = jax.vmap(jax.grad(hard_concrete.open_probability))(jnp.asarray(LOGITS))
    assert (slopes > 0).all()


@pytest.mark.slow
def test_learning_closes_the_heads_that_are_not_needed():
    known = heads.ground_truth.reverse(num_heads=4, examples=8)
    subject, (example,) = known.subject, known.subject.batches

    def learned(penalty):
        return heads.learn_gates(
            subject.model,
            subject.metric,
            subject.params,
            lambda step: example,
            penalty=penalty,
            steps=70,
            chunk=30,
            optimizer=optax.set_to_zero(),
            gate_learning_rate=0.3,
        )

    found = learned(0.05)
    np.testing.assert_array_equal(found.keep[0], known.real[0])
    assert found.loss.shape == found.expected_open.shape == (70,)
    assert found.expected_open[-1] < 1.6 < 3.5 < found.expected_open[0]
    chex.assert_trees_all_equal(found.params, subject.params)
    # At no price all stay as good as open, at a high one even the real head goes.
    assert learned(0.0).keep[0].sum() >= 3
    assert not learned(100.0).keep[0].any()


def test_each_step_has_its_own_batch_and_each_layer_its_own_gates():
    """A model that is nothing but its gates; its metric tells the step and them."""

    def apply(params, rng, inputs, *, lengths, is_training, interventions=None):
        maps = (np.zeros((1, 3, 1, 1)),) * 2
        gates = None if interventions is None else jnp.stack(interventions.heads)
        return models.Output(gates, maps)

    def metric(gates, batch):
        return batch.weights + jnp.abs(gates[0] - gates[1]) / 2

    def sample(step):
        return tasks.Example(np.zeros((1, 1), int), None, step * jnp.ones(3), None)

    found = heads.learn_gates(
        models.Model(None, apply),
        metric,
        {},
        sample,
        penalty=0.0,
        steps=5,
        chunk=2,
        optimizer=optax.set_to_zero(),
        gate_learning_rate=0.0,
        initial=0.0,
    )
    np.testing.assert_array_equal(np.floor(found.loss), np.arange(5))
    drawn = found.loss - np.arange(5)
    assert drawn.min() > 0 and len(np.unique(drawn.round(4))) == 5


def test_heads_whose_gates_are_open_a_crack_are_kept():
    learned = heads.Learned({}, [np.float32([-9, -1, 0, 9])], None, None)
    np.testing.assert_array_equal(learned.keep, [[False, True, True, True]])
    assert 0 < learned.gates[0][1] < 0.5


def test_parameters_learn_together_with_gates():
    known = heads.ground_truth.reverse(num_heads=3, examples=8)
    subject, (example,) = known.subject, known.subject.batches
    params = jax.tree.map(np.array, subject.params)
    params["logits"]["w"] *= 0.1
    found = heads.learn_gates(
        subject.model,
        subject.metric,
        params,
        lambda step: example,
        penalty=0.0,
        steps=6,
        initial=8.0,
        optimizer=optax.adam(0.05),
    )
    assert found.loss[-1] < 0.5 * found.loss[0]
