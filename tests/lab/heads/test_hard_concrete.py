"""Hard-concrete gates: their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.lab.heads import hard_concrete

LOGITS = np.float32([-3, -0.5, 0, 1, 4])


@pytest.mark.slow
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
