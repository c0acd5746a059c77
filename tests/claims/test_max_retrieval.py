"""The arithmetic of the claim on the largest weight, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import base, max_retrieval


def test_a_weight_spread_over_all_items_has_slope_minus_one():
    assert max_retrieval.slope_of((64, 256, 1024), (1 / 2, 1 / 8, 1 / 32)) == (
        pytest.approx(-1)
    )
    assert max_retrieval.slope_of((64, 256, 1024), (0.3, 0.3, 0.3)) == pytest.approx(0)


def test_scores_grow_with_the_log_of_the_items_in_the_control_alone():
    assert max_retrieval.factor_of("claim", 1024) == 1
    assert max_retrieval.factor_of(base.PLANTED, 1024) == 1
    assert max_retrieval.factor_of("control", 16) == 1
    assert max_retrieval.factor_of("control", 256) == pytest.approx(2)


def test_the_inverse_temperature_is_the_polynomial_and_never_below_one():
    entropy = np.array([0.2, 0.5, 1.0, 2.0, 6.0])
    coefficients = (-0.037, 0.481, -2.3, 4.917, -1.791)
    powers = entropy[:, None] ** np.arange(4, -1, -1)
    expected = np.where(entropy > 0.5, np.maximum(powers @ coefficients, 1), 1)
    found = max_retrieval.inverse_temperature(jnp.asarray(entropy, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
