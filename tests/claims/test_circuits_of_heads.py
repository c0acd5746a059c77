"""Whether what is planted in the control of the claim on circuits is what it says."""

import numpy as np
import pytest

from experiments.claims import circuits_of_heads as claim
from mha_haiku.lab import heads
from mha_haiku.lab.heads import circuits
from tests import oracles
from tests.lab.heads import small_models

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


def test_folded_weights_read_the_residual_stream():
    """But for a factor per position."""
    of = small_models.config()
    params, batch = small_models.random_params(of), small_models.example()
    logits, seen = oracles.recorded(params, batch.inputs, of)

    def scaled(stream):
        return stream / np.sqrt(stream.var(-1, keepdims=True) + of.norm.epsilon)

    stream = scaled(seen["encoder/layer_1/stream"])
    folded = claim.folded_weights(small_models.build(of), params, 1)
    for name in ("query", "key", "value"):
        w, b = getattr(folded, name), getattr(folded, f"{name}_bias")
        found = np.einsum("btd,hdk->bthk", stream, w) + b
        wanted = seen[f"encoder/layer_1/attention/{name}"]
        np.testing.assert_allclose(found, wanted, atol=1e-9)
    found = scaled(seen["encoder/stream"]) @ claim.folded_unembedding(params)
    constant = logits - found  # the same at all positions
    np.testing.assert_allclose(constant, constant[:1, :1] + 0 * constant, atol=1e-9)
