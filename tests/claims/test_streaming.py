"""Scores with positions in a cache, by hand."""

import functools

import numpy as np

from experiments.claims import streaming
from mha_haiku.core import positions


def _turned(x, at):
    """Returns `[T, K]` turned by positions, in float64."""
    size = x.shape[-1]
    angles = np.outer(at, 100.0 ** (-np.arange(0, size, 2) / size))
    first, second = np.split(x, 2, axis=-1)
    sine, cosine = np.sin(angles), np.cos(angles)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return np.concatenate(turned, axis=-1)


def test_kept_tokens_stand_at_the_start_of_the_cache():
    length = streaming._CACHE + 7
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(2, length, 4))
    at, kept = np.arange(length), np.array([5, 6])
    given = [_turned(x, at)[None, :, None].astype(np.float32) for x in (query, key)]
    rotate = functools.partial(positions.rotary, max_period=100.0)
    found = streaming.in_cache(*given, kept, rotate)[0, 0]
    # In the end the cache is full: the kept tokens, and behind them the last ones.
    held = [*kept, *range(length)[len(kept) - streaming._CACHE :]]
    place = np.arange(streaming._CACHE)
    turned = _turned(query[-1:], place[-1:])[0]
    expected = _turned(key[held], place) @ turned / 2
    np.testing.assert_allclose(found[-1, held], expected, atol=1e-4)
