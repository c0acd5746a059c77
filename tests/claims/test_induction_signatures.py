"""Induction scores, and the heads that are ablated for comparison."""

import numpy as np

from experiments.claims import induction_signatures


def test_scores_are_attention_beside_the_earlier_occurrence():
    length = 8  # a text of 4 tokens, twice
    weights = np.zeros((1, 2, length, length))
    for t in range(5, length):
        weights[0, 0, t, t - 4 + 1] = 0.5  # the first head is one of induction
        weights[0, 1, t, t - 4 - 1] = 0.25
    found = [induction_signatures.copied(weights, offset) for offset in (1, -1)]
    np.testing.assert_allclose(found, [[0.5, 0], [0, 0.25]])


def test_others_are_of_the_same_layers_and_not_of_the_top():
    top = [(3, 1), (3, 2), (7, 0)]
    sets = induction_signatures.others(top, 20, np.random.default_rng(0))
    assert len(sets) == 20
    for chosen in sets:
        assert [layer for layer, _ in chosen] == [3, 3, 7]
        assert len(set(chosen)) == 3 and not set(chosen) & set(top)
