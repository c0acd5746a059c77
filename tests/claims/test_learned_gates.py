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
