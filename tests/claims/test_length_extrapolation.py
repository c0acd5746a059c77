"""Rows of tokens, and what the kinds of positions do to a small causal model."""

import jax
import numpy as np
import pytest

from experiments.claims import length_extrapolation as claim


def test_rows_ask_for_the_answer_and_its_end():
    generator = np.random.default_rng(0)
    tokens, asked = claim.rows(generator, claim.sort, np.array([3, 1, 3]))
    start, separator, end = claim.START, claim.SEPARATOR, claim.END
    for row, weights, n in zip(tokens, asked, (3, 1, 3), strict=True):
        inputs, rest = row[1 : n + 1], row[n + 1 :]
        assert len(set(inputs)) == n and inputs.max() < claim.TOKENS
        expected = [separator, *sorted(inputs), end]
        assert [row[0], *rest[: n + 2]] == [start, *expected]
        assert (rest[n + 2 :] == end).all()
        # The separator asks for the first token of the answer, the last for the end.
        np.testing.assert_array_equal(np.flatnonzero(weights), n + 1 + np.arange(n + 1))


@pytest.mark.slow
def test_models_are_causal_and_see_order_by_their_positions_alone():
    params = claim.initial(jax.random.key(0))
    tokens = np.array([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [1, 2, 3, 4, 6]])
    for kind in ("none", "alibi", "learned", "offset"):
        found = claim.forward(params, tokens, np.zeros(3, int), kind)
        np.testing.assert_allclose(found[0, :4], found[2, :4], atol=1e-5)
        assert abs(found[0, 4] - found[2, 4]).max() > 1e-2
        # A model without positions sees order as well, as its layers are causal.
        assert abs(found[0, 4] - found[1, 4]).max() > 1e-4
    moved = claim.forward(params, tokens, np.full(3, 7), "offset")
    assert abs(moved - found).max() > 1e-2
    params["positions"] = np.roll(params["positions"], -7, axis=0)
    again = claim.forward(params, tokens, np.zeros(3, int), "learned")
    np.testing.assert_allclose(again, moved, atol=1e-5)
