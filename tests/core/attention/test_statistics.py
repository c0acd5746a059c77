"""Statistics, pooled maps, ranks, products and divergences against whole matrices.

B batch, T queries, S keys, H query heads, G key heads, K size per head.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import (
    attend,
    bin_edges,
    dot_product,
)
from mha_haiku.core.attention.statistics import gini
from mha_haiku.core.attention.tiled import divergences, engine, sweep
from mha_haiku.core.masks import relative
from tests import jaxprs, oracles

B, T, S, H, G, K, V = 2, 41, 53, 4, 2, 6, 7
LENGTHS = np.asarray([50, 23])
rng = np.random.default_rng(5)
TOKENS, KEY_TOKENS = rng.integers(0, 4, (B, T)), rng.integers(0, 4, (B, S))
SEPARATORS = rng.random((B, S)) < 0.2
COUNTED = rng.random((B, T)) < 0.7

CASES = {
    "everything": (masks.full(), None),
    "causal and padding": (masks.causal() & masks.padding(LENGTHS), None),
    "padded queries": (masks.padding(LENGTHS, np.asarray([30, 0])), None),
    "window": (relative.Band(T - S + 5, S - T + 3), None),
    "at random, with a bias": (
        masks.dense(rng.random((B, H, T, S)) < 0.3),
        positions.alibi(H),
    ),
    "segments": (
        masks.segments(np.sort(TOKENS, -1), np.sort(KEY_TOKENS, -1)),
        None,
    ),
}


# Tiles that do not divide the map, with heads together or not, and one that covers it.
SMALL, TOGETHER, WHOLE = (16, 16, 1), (32, 48, 3), (512, 1024, 8)
RUNS = [
    ("everything", SMALL),
    ("causal and padding", SMALL),
    ("causal and padding", WHOLE),
    ("padded queries", TOGETHER),
    ("window", SMALL),
    ("at random, with a bias", TOGETHER),
    ("segments", SMALL),
]


@pytest.fixture(
    params=[
        pytest.param(run, id=str(run), marks=[] if i in (1, 5) else [pytest.mark.slow])
        for i, run in enumerate(RUNS)
    ]
)
def found(request, arrays, monkeypatch):
    """Returns a map whose observations use tiles of some sizes, and its weights."""
    name, sizes = request.param
    use_tiles(monkeypatch, *sizes)
    mask, bias = CASES[name]
    query, key, value = arrays((B,), T, S, H, G, K, V)
    found = jax.jit(attend)(2 * query, key, value, mask=mask, bias=bias)[1]
    return found, np.asarray(found.weights(), np.float64)


def use_tiles(monkeypatch, *sizes):
    """Makes every observation use tiles of these sizes."""
    monkeypatch.setattr(engine, "_sizes", lambda factors: sweep.Sizes(*sizes))
    rows, columns, _ = sizes
    monkeypatch.setattr(divergences, "_SCORES_COMPARED", B * H * rows * columns)
    monkeypatch.setattr(divergences, "_KEYS_COMPARED", columns)
    divergences.divergence.clear_cache()


@pytest.mark.slow
def test_statistics_equal_those_of_the_whole_matrix(found, request):
    per_query = "16" in request.node.name
    found, weights = found
    asked = {
        "tokens": TOKENS,
        "key_tokens": KEY_TOKENS,
        "positions": SEPARATORS,
        "counted": COUNTED,
        "per_query": per_query,
    }
    results = found.statistics(**asked, pooled=(7, 9))
    statistics = results.values | {"received": results.received}
    counted = np.where(COUNTED[:, None, :, None], weights, 0)
    expected = oracles.pooled_map(counted, bin_edges(T, 7), bin_edges(S, 9))
    np.testing.assert_allclose(results.pooled, expected, 1e-5, 1e-6)
    unseen = found.weighting.mask.unseen_keys(T, S)
    unseen = np.zeros(S, bool) if unseen is None else np.asarray(unseen)
    unseen = np.broadcast_to(unseen, (B, 1, S) if unseen.ndim < 3 else unseen.shape)
    asked["scores"] = np.asarray(found.scores(), np.float64)
    expected = oracles.map_statistics(weights, **asked, unseen=unseen)
    assert set(statistics) == set(expected)
    for name, values in expected.items():
        assert statistics[name].shape == values.shape
        np.testing.assert_allclose(statistics[name], values, 1e-5, 1e-5, err_msg=name)


@pytest.mark.slow
def test_statistics_count_positions_from_the_first_query(arrays):
    query, key, value = arrays((B,), T, S, H, G, K, V)
    found = jax.jit(attend)(query, key, value, mask=masks.causal(), first_query=3)[1]
    weights = np.asarray(found.weights(), np.float64)
    assert weights[0, 0, 0, 3] > 0 and not weights[0, 0, 0, 4:].any()
    results = found.statistics(tokens=TOKENS, key_tokens=KEY_TOKENS)
    given = {"tokens": TOKENS, "key_tokens": KEY_TOKENS, "scores": found.scores()}
    unseen = np.broadcast_to(np.arange(S) >= T + 3, (B, 1, S))
    expected = oracles.map_statistics(weights, query_offset=3, **given, unseen=unseen)
    for name, values in expected.items():
        found = results.received if name == "received" else results.values[name]
        np.testing.assert_allclose(found, values, 1e-5, 1e-5, err_msg=name)


PARTS = [
    (slice(8, 20), slice(10, 41), (4, 5)),
    (slice(17, 18), slice(None), (1, 53)),
    (slice(30, None), slice(40, None), (128, 128)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "keys", "bins"), PARTS)
def test_pooled_map_zooms_into_a_part(queries, keys, bins, arrays, monkeypatch):
    use_tiles(monkeypatch, *SMALL)
    mask = masks.causal() & masks.padding(LENGTHS)
    found = jax.jit(attend)(*arrays((B,), T, S, H, G, K, V), mask=mask)[1]
    weights = np.asarray(found.weights(), np.float64)
    part = weights[..., queries, keys]
    edges = [bin_edges(n, most) for n, most in zip(part.shape[-2:], bins, strict=True)]
    # Queries that see count, whether what they see is in the part or not.
    counts = weights[..., queries, :].sum(-1) > 0
    expected = oracles.pooled_map(part, *edges, counts=counts)
    cells = found.pooled(*bins, queries=queries, keys=keys)
    np.testing.assert_allclose(cells, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("k", [5, S])
def test_top_weights_are_the_largest_and_stand_where_they_say(found, k):
    found, weights = found
    top = found.top(k)
    assert top.weights.shape == top.positions.shape == (B, H, T, k)
    np.testing.assert_allclose(top.weights, -np.sort(-weights, -1)[..., :k], 1e-5, 1e-6)
    positions_found = np.asarray(top.positions)
    # Weights that rounding took to 0 may be named or not; what is not seen is not.
    assert (np.asarray(top.weights)[positions_found < 0] == 0).all()
    named = np.take_along_axis(weights, np.maximum(positions_found, 0), -1)
    named = np.where(positions_found < 0, 0, named)
    np.testing.assert_allclose(named, top.weights, 1e-5, 1e-6)
    for row in positions_found.reshape(-1, k):
        assert len(set(row[row >= 0])) == (row >= 0).sum()


@pytest.mark.slow
def test_map_is_a_linear_operator(found, request):
    heads = 1 if "16" in request.node.name else H
    found, weights = found
    x = np.random.default_rng(0).normal(size=(B, S, heads, 3))
    y = np.random.default_rng(1).normal(size=(B, T, heads, 3))
    each = np.broadcast_to(x, (B, S, H, 3)), np.broadcast_to(y, (B, T, H, 3))
    expected = np.einsum("bhts,bshv->bthv", weights, each[0])
    np.testing.assert_allclose(found.apply(x), expected, 1e-5, 1e-5)
    expected = np.einsum("bhts,bthv->bshv", weights, each[1])
    np.testing.assert_allclose(found.apply_transposed(y), expected, 1e-5, 1e-5)


@pytest.mark.slow
def test_divergence_equals_that_of_the_whole_matrices(found, arrays):
    found, weights = found
    expected = oracles.divergence(weights, weights)
    divergence = found.divergence()
    np.testing.assert_allclose(divergence, expected, 1e-4, 1e-6)
    np.testing.assert_allclose(np.einsum("bhh->bh", divergence), 0, atol=1e-6)
    query, key, value = arrays((B,), T, S, H // 2, G, K, V, seed=9)
    other = jax.jit(attend)(query, key, value)[1]
    expected = oracles.divergence(weights, np.asarray(other.weights(), float))
    np.testing.assert_allclose(found.divergence(other), expected, 1e-4, 1e-6)


@pytest.mark.slow
def test_observations_go_through_vmap_and_any_batch_axes(arrays):
    query, key, value = arrays((3, 2), T, S, H, G, K, V)
    whole = jax.jit(attend)(query, key, value, mask=masks.causal())[1]

    @jax.jit
    @jax.vmap
    def observed(query, key, value):
        found = attend(query, key, value, mask=masks.causal())[1]
        return found.statistics(pooled=(4, 4)), found.top(3), found.divergence()

    expected = whole.statistics(pooled=(4, 4)), whole.top(3), whole.divergence()
    for one, other in zip(
        jax.tree.leaves(observed(query, key, value)),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


@pytest.mark.slow
def test_statistics_by_hand():
    # Weights [[1/2, 1/2, 0], [1/4, 1/4, 1/2]] of two queries on three keys.
    logs = jnp.log(jnp.asarray([[2.0, 2.0, 1e-30], [1.0, 1.0, 2.0]]))
    by_hand = attention_of_log_weights(logs)
    statistics = by_hand.statistics(pooled=(1, 3))
    log2 = np.log(2)
    expected = {
        "entropy": (log2 + 1.5 * log2) / 2,
        "perplexity": (2 + 2**1.5) / 2,
        "squared_weights": (1 / 2 + 3 / 8) / 2,
        "largest_weight": 1 / 2,
        "max_score": log2,
        "distance": (1 / 2 + 3 / 4) / 2,
        "rms_distance": np.sqrt((1 / 2 + 3 / 4) / 2),
        "previous_token": (0 + 1 / 4) / 2,
        "own_position": (1 / 2 + 1 / 4) / 2,
        "next_token": (1 / 2 + 1 / 2) / 2,
        "first_token": (1 / 2 + 1 / 4) / 2,
        "largest_at_previous": 0,
        "largest_at_own": 1 / 2,
        "largest_at_next": 1,  # the first row's two largest are equal
        "received": [3 / 4, 3 / 4, 1 / 2],
        "received_gini": 2 * (1 / 4 + 1 / 4) / (2 * 3 * 2),
        "num_queries": 2,
        "pooled": [[3 / 8, 3 / 8, 1 / 4]],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(
            getattr(statistics, name)[0], value, 1e-6, 1e-7, err_msg=name
        )


def attention_of_log_weights(logs):
    """Returns the map of one head whose scores are these `[T, S]`."""
    query, key = jnp.eye(logs.shape[0])[:, None], logs.T[:, None]
    return attend(query, key, key[..., :1], score=dot_product(1.0))[1]


@pytest.mark.slow
def test_distances_near_the_edge_of_a_far_tile_are_exact(monkeypatch):
    """Attention to the previous token, also thousands of positions from the first."""
    use_tiles(monkeypatch, 64, 64, 1)
    length = 4096
    query = jnp.ones((length, 1, 4), jnp.float32)
    mask = masks.window(1, 0) & ~masks.window(0, 0)
    found = attend(query, query, query, mask=mask)[1]
    rows = found.statistics(per_query=True)
    np.testing.assert_allclose(rows.rms_distance[0, 1:], 1, 1e-6)
    np.testing.assert_allclose(rows.distance[0, 1:], 1, 1e-6)


@pytest.mark.slow
def test_gini_of_equal_shares_is_zero_and_of_one_owner_near_one():
    np.testing.assert_allclose(gini(jnp.ones((2, 10))), 0, atol=1e-6)
    np.testing.assert_allclose(gini(jnp.eye(10)[:2]), 0.9, 1e-6)
    left_out = jnp.arange(10) >= 5
    np.testing.assert_allclose(gini(jnp.eye(10)[:2], left_out), 0.8, 1e-6)
    np.testing.assert_array_equal(gini(jnp.zeros((2, 10))), 0)


@pytest.mark.slow
def test_no_observation_holds_a_matrix(arrays):
    size = 2048
    shape = jax.ShapeDtypeStruct((1, size, 2, 8), jnp.float32)

    def observed(query, key, value):
        found = attend(query, key, value, implementation="blockwise")[1]
        return (
            found.statistics(pooled=(32, 32)),
            found.pooled(),
            found.top(4),
            found.apply(value),
            found.apply_transposed(value),
            found.divergence(),
        )

    tile = 512 * 1024
    jaxpr = jax.make_jaxpr(observed)(shape, shape, shape)
    largest = jaxprs.largest_array(jaxpr.jaxpr)
    assert largest <= tile < size * size


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.top(0), r"k must be an integer from 1 to 53, got 0"),
        (lambda m: m.top(54), r"k must be an integer from 1 to 53, got 54"),
        (lambda m: m.pooled(0, 4), "rows must be an integer of at least 1, got 0"),
        (lambda m: m.pooled(4, 0), "columns must be an integer of at least 1, got 0"),
        (lambda m: m.pooled(queries=slice(60, 70)), "queries must be a slice of cons"),
        (lambda m: m.pooled(keys=slice(0, 9, 2)), "keys must be a slice of cons"),
        (lambda m: m.statistics(pooled=(0, 1)), "rows must be an integer of at least"),
        (
            lambda m: m.statistics(tokens=KEY_TOKENS),
            r"tokens must be integers of shape \(2, 41\), got int64 of shape \(2, 53\)",
        ),
        (
            lambda m: m.statistics(tokens=TOKENS),
            r"key_tokens must be integers of shape \(2, 53\), got int64 of shape",
        ),
        (lambda m: m.statistics(key_tokens=KEY_TOKENS), "key_tokens needs tokens"),
        (
            lambda m: m.statistics(positions=SEPARATORS.astype(int)),
            r"positions must be booleans of shape \(2, 53\), got int64",
        ),
        (
            lambda m: m.apply(np.ones((B, T, H, 3))),
            r"must be \[B..., S, H, V\].*\(2, 53, 4\) and V here; got shape \(2, 41",
        ),
        (
            lambda m: m.apply_transposed(np.ones((B, T, 3, 3))),
            r"must be \[B..., T, H, V\].*\(2, 41, 4\) and V here; got shape",
        ),
        (
            lambda m: m.divergence(
                attend(jnp.ones((B, T, H, K)), *[jnp.ones((B, T, G, K))] * 2)[1]
            ),
            r"same batch axes, T and S; got shapes \(2, 4, 41, 53\) and \(2, 4, 41, 41",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ask, message, arrays):
    query, key, value = arrays((B,), T, S, H, G, K, V)
    found = jax.jit(attend)(query, key, value)[1]
    with pytest.raises(ValueError, match=message):
        ask(found)
