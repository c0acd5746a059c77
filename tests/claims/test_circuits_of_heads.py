"""Whether what is planted in the control of the claim on circuits is what it says."""

import numpy as np
import pytest

from experiments.claims import circuits_of_heads as claim
from mha_haiku.lab import heads
from mha_haiku.lab.heads import circuits

H, D, K, N = 3, 8, 4, 11


@pytest.fixture
def drawn():
    generator = np.random.default_rng(0)

    def layer():
        shapes = 3 * [(H, D, K)] + [(H, K, D)] + 3 * [(H, K)]
        return heads.HeadWeights(*(generator.normal(size=shape) for shape in shapes))

    ends = generator.normal(size=(N, D)), generator.normal(size=(D, N))
    return layer(), layer(), *ends


def test_planted_heads_copy(drawn):
    weights, _, *ends = drawn
    scores = claim.copying_score(claim.copying(weights, *ends), *ends)
    np.testing.assert_allclose(scores, 1, atol=1e-9)


def test_the_planted_pair_matches_and_has_the_largest_composition(drawn):
    first, second, embedding, unembedding = drawn
    second = claim.inducing(first, second, embedding, unembedding)
    pairs = circuits.composition("k", first, second)
    assert pairs.argmax() == 0
    earlier, later = (
        heads.HeadWeights(*(x[0] for x in weights)) for weights in (first, second)
    )
    score = claim.matching_score(later, embedding, earlier=earlier)
    assert score == pytest.approx(1)


def test_random_matrices_compose_by_the_root_of_the_width(drawn):
    first, second, *_ = drawn
    found = claim.random_composition(0, first, second)
    assert D**-0.5 < found < 3 * D**-0.5


def test_scores_are_shares_of_eigenvalues(drawn):
    first, second, embedding, unembedding = drawn
    one, before = (heads.HeadWeights(*(x[1] for x in y)) for y in (second, first))

    def share(matrix):
        values = np.linalg.eigvals(matrix)
        return values.sum().real / np.abs(values).sum()

    full = embedding @ one.value @ one.output @ unembedding
    found = claim.copying_score(one, embedding, unembedding)
    np.testing.assert_allclose(found, share(full), atol=1e-6)
    keys = embedding @ before.value @ before.output
    full = embedding @ one.query @ one.key.T @ keys.T
    found = claim.matching_score(one, embedding, earlier=before)
    np.testing.assert_allclose(found, share(full), atol=1e-6)
    away = one._replace(value=-one.output.T)
    np.testing.assert_allclose(claim.copying_score(away, np.eye(D), np.eye(D)), -1)
    with pytest.raises(ValueError, match="must have the same tokens"):
        claim.copying_score(one, embedding, unembedding[:, :-1])
