"""The arithmetic of the claim on the emergence of induction, in NumPy."""

import jax
import numpy as np
import pytest

from experiments.claims import induction_emergence as claim


@pytest.mark.slow
def test_the_query_is_an_item_and_its_label_stands_at_the_place():
    tokens, right, places = map(np.asarray, claim.drawn(jax.random.key(0), 5))
    assert tokens.shape[1] == 11
    for row, label, place in zip(tokens, right, places, strict=True):
        assert row[place - 1] == row[-1]
        assert row[place] == label + 32
        assert len(set(row[:-1:2])) == 5


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True])
def test_answers_are_those_of_two_layers_in_numpy(is_given):
    tokens, *_ = map(np.asarray, claim.drawn(jax.random.key(1), 3))
    length, width = 7, 32 + 4 + 7
    generator = np.random.default_rng(0)
    params = {
        "first": generator.normal(size=(width, width)),
        "second": generator.normal(size=(2 * width, 2 * width)),
        "output": generator.normal(size=(2 * width, 4)),
    }
    single = jax.tree.map(np.float32, params)
    logits, weights = claim.answers(single, tokens, is_given=is_given)
    for b in range(2):
        x = np.zeros((length, width))
        x[np.arange(length), tokens[b]] = 1
        x[np.arange(length), 36 + np.arange(length)] = 1
        before = np.zeros_like(x)
        for t in range(length):
            scores = x[t] @ params["first"] @ x[: t + 1].T
            if is_given:
                scores = np.array([20.0 * (s == t - 1) for s in range(t + 1)])
            before[t] = _softmax(scores) @ x[: t + 1]
        x = np.concatenate([x, before], axis=1)
        expected = _softmax(x[-1] @ params["second"] @ x.T)
        np.testing.assert_allclose(weights[b], expected, atol=1e-5)
        np.testing.assert_allclose(
            logits[b], expected @ x @ params["output"], atol=1e-4
        )


def test_the_exponent_of_a_square_is_two():
    assert claim.exponent_of((2, 4, 8), (12, 48, 192)) == pytest.approx(2)


def _softmax(scores):
    masses = np.exp(scores - scores.max())
    return masses / masses.sum()
