"""The reference gives what NumPy does."""

import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import reference
from tests import oracles

B, T, S, H, G, K, V = 2, 5, 7, 6, 3, 4, 3

MASKS = {
    "none": None,
    "causal": masks.causal(),
    "padding": masks.padding(np.array([S, 4])),
    "a query that sees nothing": masks.padding(np.array([S, 0])) & masks.window(1, 2),
    "of heads": np.random.default_rng(3).random((B, H, T, S)) < 0.4,
}


@pytest.fixture
def given():
    rng = np.random.default_rng(0)
    sizes = (B, T, H, K), (B, S, G, K), (B, S, G, V)
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]


def _allowed(mask):
    """Returns `[B, H, T, S]` booleans."""
    if mask is None:
        return None
    if isinstance(mask, np.ndarray):
        return mask
    tile = mask.aligned(1).aligned_tile(np.arange(T), np.arange(S))
    return np.broadcast_to(tile, (B, H, T, S))


def _bias():
    return np.random.default_rng(1).normal(size=(B, H, T, S)).astype(np.float32)


@pytest.mark.parametrize("mask", MASKS)
def test_it_is_attention_query_by_query_in_float64(given, mask):
    allowed, bias = _allowed(MASKS[mask]), _bias()
    found = reference.attention(*given, allowed, bias)
    wanted = oracles.attention(*given, allowed=allowed, bias=bias)
    values, weights, logsumexp = found
    np.testing.assert_allclose(values, wanted.values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, wanted.weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logsumexp, wanted.logsumexp, rtol=1e-5, atol=1e-6)
