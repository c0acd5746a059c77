"""The arithmetic of the claim on recall, in float64 NumPy and by hand."""

import jax
import numpy as np
import pytest

from experiments.claims import multi_query_recall as claim


def test_the_size_that_is_needed_lies_between_two_by_their_logs():
    sizes = (2, 4, 8)
    assert claim.size_needed(sizes, (0.95, 1.0, 1.0)) == 2
    assert claim.size_needed(sizes, (0.1, 0.2, 0.3)) == 16
    assert claim.size_needed(sizes, (0.1, 0.9, 1.0)) == pytest.approx(4)
    assert claim.size_needed(sizes, (0.1, 0.8, 1.0)) == pytest.approx(4 * 2**0.5)


def test_keys_are_different_in_an_example():
    keys, values, words = claim.drawn(jax.random.key(0), 7)
    assert all(len(set(row)) == len(row) for row in np.asarray(keys).tolist())
    assert keys.shape == values.shape and words.shape[0] == 7


@pytest.mark.parametrize("is_linear", [False, True])
def test_recall_is_attention_over_pairs_in_numpy(is_linear):
    generator = np.random.default_rng(0)
    width, channels, pairs = 5, np.array([1, 1, 1, 0, 0]), 3
    params = {
        "query": generator.normal(size=(6, width)),
        "key": generator.normal(size=(6, width)),
        "value": generator.normal(size=(4, width)),
        "output": generator.normal(size=(width, 4)),
    }
    keys, values = np.array([[0, 3, 5, 1]]), np.array([[2, 0, 3, 1]])
    queried = np.array([[5, 0]])
    logits = claim.recall(
        jax.tree.map(np.float32, params),
        keys,
        values,
        queried,
        pairs,
        np.float32(channels),
        is_linear=is_linear,
    )
    for place, token in enumerate(queried[0]):
        query = params["query"][token, :3]
        key, value = params["key"][keys[0, :3], :3], params["value"][values[0, :3]]
        scores = np.exp(key @ query / np.sqrt(3))
        if is_linear:
            query, key = (np.where(x > 0, x + 1, np.exp(x)) for x in (query, key))
            scores = key @ query
        mixed = scores @ (value * channels) / scores.sum()
        np.testing.assert_allclose(
            logits[0, place], mixed @ params["output"], rtol=1e-4
        )
