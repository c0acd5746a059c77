"""Finer parts of pooled maps, and masked cells, against the whole map in NumPy."""

import jax
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend
from mha_haiku.showing import zoom

B, T, S, H, G, K = 2, 83, 70, 4, 2, 3
LENGTHS = np.array([70, 41])
MASK = masks.padding(LENGTHS) & ~masks.global_tokens([5]) | masks.window(9, 2)


@pytest.fixture(scope="module")
def attention_map():
    keys = jax.random.split(jax.random.key(0), 3)
    query = 3 * jax.random.normal(keys[0], (B, T, H, K))
    key = jax.random.normal(keys[1], (B, S, G, K))
    return jax.jit(lambda q, k: attend(q, k, k, mask=MASK)[1])(query, key)


@pytest.fixture(scope="module")
def found(attention_map):
    def both(attention_map):
        pooled = attention_map.pooled(4, 5)
        return pooled, zoom.patches(attention_map, pooled, counts=(2, 3), side=4)

    pooled, parts = jax.jit(both)(attention_map)
    return np.asarray(pooled), jax.tree.map(np.asarray, parts)


def _pooled(weights, first_query, first_key, width, side):
    """Returns one part `[R, R]` of a whole map `[T, S]`, by loops."""
    result = np.zeros((side, side))
    for i in range(side):
        rows = weights[first_query + i * width : first_query + (i + 1) * width]
        rows = rows[rows.sum(-1) > 0]
        for j in range(side):
            start = first_key + j * width
            mass = rows[:, start : start + width].sum()
            result[i, j] = mass / max(1, len(rows))
    return result


@pytest.mark.slow
def test_patches_are_the_whole_map_pooled(attention_map, found):
    weights = np.asarray(attention_map, np.float64)
    _, (places, values) = found
    # 83 queries in 4 bins of 21: then bins of 4, then single positions.
    assert places[0, 0, :, 2].tolist() == [4, 4, 1, 1, 1]
    assert values.shape == (B, H, 5, 4, 4)
    for b, h in np.ndindex(B, H):
        for place, part in zip(places[b, h], values[b, h], strict=True):
            np.testing.assert_allclose(
                part, _pooled(weights[b, h], *place, 4), rtol=1e-5, atol=1e-6
            )


@pytest.mark.slow
def test_patches_at_the_end_are_means_over_the_queries_that_there_are(attention_map):
    pooled = attention_map.pooled(4, 5)
    both = zoom.patches(attention_map, pooled, counts=(30, 1), side=4)
    places, values = jax.tree.map(np.asarray, both)
    weights = np.asarray(attention_map, np.float64)
    assert places[1, 2, :30, 0].max() == 80  # of 83 queries, in bins of 4
    for place, part in zip(places[1, 2], values[1, 2], strict=True):
        np.testing.assert_allclose(part, _pooled(weights[1, 2], *place, 4), atol=1e-6)


def test_patches_lie_where_the_mass_is(attention_map, found):
    weights = np.asarray(attention_map, np.float64)
    _, (places, _) = found
    for b, h in np.ndindex(B, H):
        coarse, fine = places[b, h, :2], places[b, h, 2:]
        regions = {(q, k) for q in range(0, 16, 4) for k in range(0, 16, 4)}
        mass = {
            (q0 + q, k0 + k): weights[b, h, q0 + q :, k0 + k :][:4, :4].sum()
            for q0, k0, _ in coarse
            for q, k in regions
        }
        best = sorted(mass.values())[-3:]
        chosen = sorted(mass[q, k] for q, k, _ in fine)
        # Bins are means over queries that see: here all do, or none of a bin.
        np.testing.assert_allclose(chosen, best, rtol=1e-4)


def test_patches_of_a_part_without_positions_have_no_mass(attention_map, found):
    _, (places, values) = found
    past = places[..., 0] + 4 * places[..., 2] > T
    assert past.any() or places[..., 1].max() + 4 <= S
    assert (values >= 0).all()
    assert (values.sum(-1) <= 1 + 1e-5).all()


def test_whole_maps_and_maps_without_heads_have_no_patches(attention_map):
    assert zoom.patches(attention_map, attention_map.weights()) is None
    query, key = np.zeros((B, T, 0, K), "f4"), np.zeros((B, S, 1, K), "f4")
    _, none = attend(query, key, key)
    assert zoom.patches(none, none.pooled(4, 5)) is None


def test_channels_make_the_scores(attention_map):
    query, key, exact = zoom.channels(attention_map)
    assert exact and query.shape == (B, H, T, K) and key.shape == (B, H, S, K)
    scores = np.einsum("bhtk,bhsk->bhts", *map(np.float64, (query, key)))
    weights = np.asarray(attention_map)
    masked = np.broadcast_to(zoom.masked_cells(attention_map), weights.shape)
    expected = np.where(masked, 0, np.exp(scores))
    sums = np.maximum(expected.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(weights, expected / sums, atol=1e-5)


def test_masked_cells_of_a_whole_map_are_what_the_mask_forbids(attention_map):
    masked = np.asarray(zoom.masked_cells(attention_map))
    assert masked.shape == (B, 1, T, S)
    t, s = np.arange(T)[:, None], np.arange(S)
    window = (s >= t - 9) & (s <= t + 2)
    for b in range(B):
        allowed = (s < LENGTHS[b]) & (s != 5) & (t != 5) | window
        np.testing.assert_array_equal(masked[b, 0], ~allowed)


def test_masked_cells_of_a_pooled_map_hold_no_open_pair():
    query = np.zeros((B, T, H, K), np.float32)
    mask = masks.window(14, 0) & masks.padding(LENGTHS)
    _, attention_map = attend(query, query[:, :S], query[:, :S], mask=mask)
    masked = np.asarray(jax.jit(lambda x: zoom.masked_cells(x, 4, 5))(attention_map))
    allowed = np.asarray(mask.array(T, S))
    edges = [np.append(np.arange(0, T, 21), T), np.append(np.arange(0, S, 14), S)]
    assert masked.shape == (B, 1, 4, 5)
    for b, p, q in np.ndindex(B, 4, 5):
        rows, columns = (
            slice(*e[i : i + 2]) for e, i in zip(edges, (p, q), strict=True)
        )
        assert masked[b, 0, p, q] == (not allowed[b, rows, columns].any())


def test_masks_that_differ_by_head_do_so_in_their_cells():
    allowed = np.random.default_rng(0).random((B, H, T, S)) < 0.5
    query = np.zeros((B, T, H, K), np.float32)
    mask = masks.dense(allowed)
    _, attention_map = attend(query, query[:, :S], query[:, :S], mask=mask)
    np.testing.assert_array_equal(zoom.masked_cells(attention_map), ~allowed)
