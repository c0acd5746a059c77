"""Scores of heads of all sizes, and the matrices that a small head makes."""

import numpy as np

from experiments.claims import base, head_sizes


def test_a_head_of_a_size_has_its_channels_and_its_scale():
    generator = np.random.default_rng(0)
    width, sizes = head_sizes._WIDTH, len(head_sizes._SIZES)
    inputs = generator.normal(size=(2, sizes, 3, 5, width))
    query, key = projections = generator.normal(size=(2, 2, sizes, 3, width, width))
    found = head_sizes.scores_of(projections, inputs)
    for size in (1, 4, width):
        x = inputs[1, size - 1, 2]
        q, k = (x @ y[1, size - 1, 2][:, :size] for y in (query, key))
        expected = q @ k.T / np.sqrt(size)
        np.testing.assert_allclose(found[1, size - 1, 2], expected, rtol=1e-4)


def test_matrices_of_the_control_have_scores_of_low_rank_in_the_inputs():
    for arm, rank in (("claim", 15), ("control", 4), (base.PLANTED, 15)):
        inputs, weights = head_sizes._drawn(np.random.default_rng(1), arm)
        np.testing.assert_allclose(weights.sum(-1), 1)
        scores = np.log(weights)
        scores -= scores.mean(-1, keepdims=True)  # which softmax ignores
        ranks = np.linalg.matrix_rank(scores, tol=1e-6)
        assert ranks.max() == rank
        assert (np.linalg.matrix_rank(inputs[0, 3]) == 4).all()
        assert (np.linalg.matrix_rank(inputs[1, 3]) == 16).all()
