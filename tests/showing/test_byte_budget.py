"""Dossiers fitted to little room: rounded, fewer, coarser, with a note."""

import numpy as np
import pytest

from mha_haiku import records
from mha_haiku.records import map_set
from mha_haiku.showing import byte_budget, page
from tests.showing.saved_maps import make_maps_of_kinds

L, H, T, N = 2, 3, 48, 4


def _render(shown):
    return page.to_json(page.contents(shown))


def _fitted(whole, budget):
    """The largest cut that fits, and its rendering."""
    pairs = ((shown, _render(shown)) for shown in byte_budget.cuts(whole, budget))
    return next(pair for pair in pairs if len(pair[1]) <= budget)


@pytest.fixture
def large(rng):
    """A dossier of random maps with a mean."""
    axis = map_set.Axis(("ab",) * T * 2, 2 * np.arange(T + 1))

    def maps():
        scores = np.exp(3 * rng.normal(size=(H, T, T)))
        return scores / scores.sum(-1, keepdims=True)

    examples = [map_set.Example(str(n), axis, axis, (maps(),) * L) for n in range(N)]
    examples.append(map_set.Example("mean", axis, axis, (maps(),) * L, is_mean=True))
    layers = tuple(records.Layer(str(i), tuple("012")) for i in range(L))
    return map_set.Dossier("", (map_set.MapSet("", layers, tuple(examples)),))


def test_what_fits_is_left_as_it_is(large):
    shown, given = _fitted(large, 10**7)
    assert given == _render(shown)
    assert len(shown.sets[0].examples) == N + 1 and not shown.rounding
    assert page.contents(shown)["notes"][0].startswith("Pooled")


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1, 0.03])
def test_what_does_not_fit_is_made_to(large, share):
    budget = int(share * len(_render(large)))
    shown, given = _fitted(large, budget)
    assert len(given) <= budget
    (maps,) = shown.sets
    assert maps.examples[-1].is_mean
    assert shown.rounding
    for example in maps.examples:
        for weights in example.weights:
            np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_kinds_are_joined_along_their_own_axes(load):
    maps = load(make_maps_of_kinds())
    whole = map_set.Dossier("", (maps,))
    one = byte_budget.cut(whole, 1, 2, 10**6).sets[0].examples[0]
    assert [weights.shape[1:] for weights in one.weights] == [(3, 3), (2, 2), (2, 3)]
    for weights in one.weights:
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-2)


def test_a_bin_of_a_difference_is_the_mean_of_its_queries(rng):
    weights = rng.normal(size=(H, 6, 4))
    weights[:, :, -1] -= weights.sum(-1)  # as of two maps whose rows sum to 1
    weights[:, 1] = [-1, 0, 0, 1]  # exactly 0
    weights[:, 4:] = [[2, 0, -2, 0], [0, 0, 0, 0]]  # the last query sees no key
    queries, keys = (map_set.Axis.whole("a" * n) for n in (6, 4))
    example = map_set.Example("", queries, keys, (weights,))
    layers = (records.Layer("", tuple("012")),)
    whole = map_set.Dossier("", (map_set.MapSet("", layers, (example,)),))
    (joined,) = byte_budget.cut(whole, 1, 2, 10**6).sets[0].examples[0].weights
    wanted = weights.reshape(H, 3, 2, 2, 2).sum((2, 4)) / np.array([[2], [2], [1]])
    np.testing.assert_allclose(joined, wanted, atol=1e-12)
