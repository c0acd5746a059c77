"""Masks of only positions, against statements about pairs of positions."""

import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.masks import relative
from tests import oracles

T, S = 5, 7
KINDS = {
    "full": (masks.full(), lambda t, s: True),
    "causal": (masks.causal(), lambda t, s: s <= t),
    "window": (masks.window(2, 1), lambda t, s: t - 2 <= s <= t + 1),
    "window of itself": (masks.window(0, 0), lambda t, s: s == t),
    "window to the left": (masks.window(1, None), lambda t, s: s >= t - 1),
    "window to the right": (masks.window(None, 1), lambda t, s: s <= t + 1),
    "window without ends": (masks.window(None, None), lambda t, s: True),
    "function": (masks.where(lambda t, s: t == 2 * s), lambda t, s: t == 2 * s),
}


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_later_queries_are_asked_at_their_positions(name, offset):
    mask, allows = KINDS[name]
    expected = [[allows(t + offset, s) for s in range(S)] for t in range(T)]
    tile = mask.tile(range(offset, offset + T), range(S))
    np.testing.assert_array_equal(tile, expected)


@pytest.mark.parametrize(
    ("mask", "rows", "expected"),
    [
        (masks.causal(), (2, 5), (0, 5)),
        (masks.causal(), (5, 20), (0, 10)),
        (masks.window(None, 3), (2, 5), (0, 8)),
        (relative.Band(None, -4), (2, 5), (0, 1)),
        (relative.Band(None, -9), (2, 5), (0, 0)),
        (masks.window(1, 2), (3, 5), (2, 7)),
        (masks.window(1, None), (3, 5), (2, 10)),
        (masks.window(1, 2), (20, 25), (10, 10)),
        (masks.window(2, 0) & masks.window(0, 2), (3, 5), (3, 5)),
        (masks.window(0, 0) | masks.window(0, 3), (3, 5), (3, 8)),
        (relative.Band(-2, 5) & masks.full(), (2, 4), (4, 9)),
        (relative.Band(3, 0) | relative.Band(None, -2), (2, 4), (0, 4)),
        (masks.full(), (3, 5), (0, 10)),
    ],
)
def test_key_range_is_tight_for_bands(mask, rows, expected):
    assert mask.key_range(rows, (0, 10)) == expected
    assert all(isinstance(end, int) for end in mask.key_range(rows, (0, 10)))


@pytest.mark.parametrize("first", [0, 2, 6])
@pytest.mark.parametrize("name", KINDS)
def test_unseen_keys_and_fully_masked_queries_are_exact(name, first):
    mask = KINDS[name][0]
    array = np.asarray(mask.tile(range(first, first + 2), range(S)))
    unseen, blind = oracles.unseen_and_masked(mask, 2, S, first)
    np.testing.assert_array_equal(unseen, ~array.any(-2))
    np.testing.assert_array_equal(blind, ~array.any(-1))
    later = mask.aligned(0).unseen_keys(2, S - 3, first, 3)
    later = np.zeros(S - 3, bool) if later is None else np.squeeze(later)
    np.testing.assert_array_equal(later, ~array[:, 3:].any(-2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.window(-1, 0), "left must be an integer of at least 0, got -1"),
        (lambda: masks.window(0, -2), "right must be an integer of at least 0, got -2"),
        (lambda: masks.window(1.5, 0), "left must be an integer .* got 1.5"),
    ],
)
def test_positions_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
