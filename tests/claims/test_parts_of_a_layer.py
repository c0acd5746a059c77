"""Unscaled attention is compared when the scaled one has learned."""

import jax
import numpy as np
import pytest

from experiments.claims import parts_of_a_layer as claim


def test_models_are_compared_at_the_step_at_which_the_scaled_one_has_learned():
    scaled = np.array([[0.1, 0.2, 0.3, 1.0], [0.3, 0.5, 0.995, 0.9]])
    other = np.array([[0.1, 0.6, 0.7, 0.9], [0.2, 0.3, 0.4, 0.5]])
    assert claim.compared(scaled, other) == (0.995, 0.7, 3 * claim._PART)
    assert claim.compared(0.9 * scaled, other) == (0.9, 0.9, 0)


def test_the_slope_is_per_step_of_the_sizes():
    np.testing.assert_allclose(claim.slope([0.5, 0.7, 0.9, 1.1]), 0.2)


@pytest.mark.slow
def test_weights_are_a_softmax_of_scaled_dot_products():
    params = jax.device_get(claim.initial(jax.random.key(0), 16))
    params = {name: x.astype(np.float64) for name, x in params.items()}
    tokens = np.arange(8)[None] % 3
    _, found = claim.forward(params, tokens, 0.3)
    x = params["tokens"][tokens] + params["positions"][None]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    scores = 0.3 * (x @ params["query"]) @ (x @ params["key"]).mT
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
