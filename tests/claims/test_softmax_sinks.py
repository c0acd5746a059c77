"""ReLU in place of softmax is what it says, and so are its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import softmax_sinks


def test_weights_are_positive_scores_over_the_number_of_keys():
    scores = 3 * np.random.default_rng(0).normal(size=(2, 1, 5, 5))

    def weights(scores):
        return jnp.exp(softmax_sinks.relu(jax.nn.log_sigmoid(scores)))

    count = np.arange(1, 6)[:, None]
    found = weights(jnp.float32(scores))
    np.testing.assert_allclose(found, np.maximum(scores, 0) / count, atol=1e-5)
    slopes = jax.grad(lambda x: weights(x).sum())(jnp.float32(scores))
    np.testing.assert_allclose(slopes, (scores > 0) / count, atol=1e-4)
