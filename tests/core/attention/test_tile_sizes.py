"""Tile sizes follow what a mask rules out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks
from mha_haiku.core import tiles
from mha_haiku.core.attention.tiled import sweep

SHAPE = (1, 8, 2048, 2048)


def sizes_of(mask, shape=SHAPE, platform="cpu", **options):
    return sweep.default_sizes(shape, attention.Weighting(mask, **options), platform)


def scores_of(sizes, mask, size):
    """How many scores of a head are computed, by asking the mask itself."""
    count = 0
    for first in range(0, size, sizes.rows):
        for start in range(0, size, sizes.columns):
            tile = mask.tile(
                slice(first, min(first + sizes.rows, size)),
                slice(start, min(start + sizes.columns, size)),
            )
            count += sizes.rows * sizes.columns * bool(tile.any())
    return count


@pytest.mark.slow
def test_causal_tiles_are_smaller_than_those_of_a_full_map():
    full, causal = sizes_of(masks.full()), sizes_of(masks.causal())
    assert full.rows * full.columns > causal.rows * causal.columns
    computed = [scores_of(x, masks.causal(), 2048) for x in (causal, full)]
    assert computed[0] < computed[1]


def test_a_longer_causal_map_has_larger_tiles():
    short, long = (sizes_of(masks.causal(), (1, 4, n, n)) for n in (1024, 2**14))
    assert short.rows * short.columns < long.rows * long.columns


def test_lengths_that_are_not_known_count_as_causal():
    seen = []

    @jax.jit
    def asked(lengths):
        seen.append(sizes_of(masks.padding(lengths)))
        seen.append(sizes_of(masks.padding(lengths) & masks.causal()))
        return lengths

    asked(np.array([3]))
    assert seen == [sizes_of(masks.causal())] * 2
    moved = jax.jit(
        lambda n: seen.append(sizes_of(masks.causal(), origin=tiles.Origin(n))) or n
    )
    moved(3)
    assert seen[-1] == seen[0]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(
    "shape", [(0, 8, 5, 5), (2, 3, 0, 7), (2, 3, 7, 0), (2, 3, 1, 4000), (7, 1, 33, 9)]
)
def test_tiles_fit_any_map(shape, platform):
    rows, columns, together = sizes_of(masks.causal(), shape, platform)
    assert 1 <= rows <= max(shape[-2], 1) and 1 <= columns <= max(shape[-1], 1)
    assert together >= 1 and (shape[0] * shape[1]) % together == 0


@pytest.mark.slow
def test_scores_far_below_zero_are_a_softmax_like_others_without_a_mask():
    query = jnp.full((1, 32, 1, 2), 1e16)
    key = -jnp.linspace(1e15, 1.1e15, 32)[None, :, None, None] * jnp.ones((1, 32, 1, 2))
    value = jnp.arange(32.0)[None, :, None, None]
    values, found = attention.attend(
        query, key, value, implementation=attention.Blockwise(16, 16)
    )
    expected, _ = attention.attend(query, key, value, implementation="formula")
    assert (query[0, 0, 0] @ key[0, 0, 0]) < -1e30
    np.testing.assert_allclose(values, expected)
    assert np.isfinite(found.logsumexp).all()
