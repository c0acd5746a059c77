"""Observations of a map with rows of NaN: felt by their own heads, if they count.

B batch, N positions, H query heads, G key heads, K size per head.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend, bin_edges
from mha_haiku.core.attention.tiled import engine, sweep
from tests import oracles

B, N, H, G, K = 2, 21, 4, 2, 3
FIRST = 13  # the position that is NaN in the first two heads of the second example
FEELS = np.zeros([B, H], bool)
FEELS[1, :2] = True
EARLIER = np.broadcast_to(np.arange(N) < FIRST, (B, N))
ALL = np.ones([B, N], bool)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(engine, "_sizes", lambda factors: sweep.Sizes(16, 16, 1))


@pytest.fixture
def inputs(arrays):
    """Returns queries and keys, and the same with NaN."""
    query, key, _ = arrays((B,), N, N, H, G, K, K)
    return (query, key), (query, key.at[1, FIRST, 0, 1].set(np.nan))


@jax.jit
def observed(query, key, counted):
    _, found = attend(query, key, key, mask=masks.causal())
    y = jnp.ones((B, N, 1, 2))
    return {
        "statistics": found.statistics(pooled=(5, 3), counted=counted),
        "pooled": found.pooled(5, 3),
        "top": found.top(3),
        "divergence": found.divergence(),
        "transposed": found.apply_transposed(y),
        "weights": found.weights(),
    }


@pytest.mark.slow
def test_a_row_of_nan_that_counts_is_felt_by_its_head_alone(inputs):
    clean, felt = (observed(*each, ALL) for each in inputs)
    weights = np.asarray(felt["weights"], np.float64)
    rows = np.isnan(weights).any(-1)
    np.testing.assert_array_equal(rows, FEELS[..., None] & ~EARLIER[:, None])

    statistics = felt["statistics"]
    for name, found in (statistics.values | {"received": statistics.received}).items():
        if name == "num_queries":
            continue
        assert np.isnan(found[FEELS]).all(), name
        wanted = getattr(clean["statistics"], name)
        np.testing.assert_array_equal(found[~FEELS], wanted[~FEELS], err_msg=name)
    np.testing.assert_array_equal(felt["statistics"].num_queries, N)
    edges = bin_edges(N, 5), bin_edges(N, 3)
    for pooled in (felt["statistics"].pooled, felt["pooled"]):
        cells = oracles.pooled_map(np.where(rows[..., None], 0, weights), *edges)
        has_nan = np.logical_or.reduceat(rows, edges[0][:-1], axis=-1)
        cells = np.where(has_nan[..., None], np.nan, cells)
        np.testing.assert_allclose(pooled, cells, 1e-5, 1e-6)

    found, wanted = felt["top"].weights, clean["top"].weights
    assert np.isnan(found[rows]).all()
    np.testing.assert_array_equal(found[~rows], wanted[~rows])
    assert (felt["top"].positions[rows] == -1).all()
    pairs = FEELS[:, :, None] | FEELS[:, None]
    np.testing.assert_array_equal(np.isnan(felt["divergence"]), pairs)
    np.testing.assert_array_equal(
        np.isnan(felt["transposed"]).all((1, 3)), FEELS, "every key receives it"
    )


@pytest.mark.slow
def test_a_row_of_nan_that_does_not_count_changes_no_bit(inputs):
    clean, felt = (observed(*each, EARLIER)["statistics"] for each in inputs)
    jax.tree.map(np.testing.assert_array_equal, felt, clean)
    assert np.isfinite(felt.rms_distance).all()


@pytest.mark.slow
def test_a_query_of_nan_without_a_mask_is_felt_in_its_own_row(inputs):
    @jax.jit
    def without_a_mask(query, key):
        found = attend(query, key, key)[1]
        per_query = found.statistics(per_query=True).perplexity
        return found.statistics(pooled=(5, 3), counted=EARLIER), per_query

    query, key = inputs[0]
    felt, rows = without_a_mask(query.at[1, FIRST:].set(np.nan), key)
    clean, clean_rows = without_a_mask(query, key)
    jax.tree.map(np.testing.assert_array_equal, felt, clean)
    assert np.isnan(rows[1, :, FIRST:]).all()
    np.testing.assert_array_equal(rows[0], clean_rows[0])
    np.testing.assert_array_equal(rows[..., :FIRST], clean_rows[..., :FIRST])


@pytest.mark.slow
def test_a_row_of_nan_has_no_gradient(inputs):
    @jax.jit
    @jax.grad
    def gradients(inputs):
        found = attend(*inputs, inputs[1], mask=masks.causal())[1]
        results = found.statistics(pooled=(5, 3)), found.divergence()
        leaves = [x for x in jax.tree.leaves(results) if x.dtype != int]
        return sum((x * 1.5).sum() for x in leaves)

    for found, clean in zip(*map(gradients, inputs), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[0], clean[0], rtol=1e-6)
        assert np.abs(found[0]).max() > 0.01
