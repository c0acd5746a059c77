"""Which heads are important, and how the learning rate falls."""

import numpy as np

from experiments.claims import learned_gates as claim


def test_importance_is_compared_across_parts_by_the_norm_of_each():
    # By hand: divided by their norms, 5 and 13, the rows are 0.6, 0.8 and 0.38, 0.92.
    importance = np.array([[3.0, 4.0], [5.0, 12.0]])
    found = [claim.most_important(importance, count).tolist() for count in (1, 2, 3)]
    assert found[0] == [[False, False], [False, True]]
    assert found[1] == [[False, True], [False, True]]
    assert found[2] == [[True, True], [False, True]]


def test_the_rate_is_constant_and_then_falls_to_zero():
    found = claim.rates(1800)
    assert found.shape == (1800,)
    np.testing.assert_allclose(found[:801], found[0])
    np.testing.assert_allclose(np.diff(found[800:]), -found[0] / 1000, rtol=1e-3)
    quarter = claim.rates(1800, 4)  # in whole calls of 100 steps
    assert quarter.shape == (400,)
    np.testing.assert_allclose(quarter[:150], found[0])
    np.testing.assert_allclose(quarter[-1], found[0] / 250, rtol=1e-5)
