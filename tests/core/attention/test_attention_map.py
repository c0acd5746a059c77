"""The attention map: its tiles, its pools, its way through transformations.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mha_haiku import masks, positions
from mha_haiku.core.attention import AttentionMap, attend, bin_edges
from tests.core.attention.rated_score import Rated

B, T, S, H, G, K, V = 2, 7, 9, 4, 2, 6, 3
L = 4  # as many as there are virtual devices
LENGTHS = np.asarray([9, 4])


def _at_three(t, s):
    return (t == 3) | (s == 3)


def map_of(inputs, lengths=LENGTHS):
    """Returns a map with every kind of part: mask, bias, score with parameters."""
    mask = masks.padding(lengths) & ~masks.where(_at_three)
    table = jnp.linspace(-1, 1, 8 * H).reshape(8, H)
    score = Rated(jnp.linspace(1, 4, H))
    bias = positions.relative_bias(table, bidirectional=True, max_distance=5)
    mask = mask | masks.window(0, 0)
    return attend(*inputs, mask=mask, bias=bias, score=score)[1]


@pytest.fixture(scope="module")
def inputs(arrays):
    return arrays((B,), T, S, H, G, K, V)


@pytest.fixture(scope="module")
def attention_map(inputs):
    return jax.jit(map_of)(inputs)


@pytest.fixture(scope="module")
def weights(attention_map):
    return np.asarray(attention_map)


def test_map_says_its_shape_without_being_made(attention_map):
    assert attention_map.shape == (B, H, T, S)
    assert attention_map.ndim == 4
    assert attention_map.dtype == jnp.float32
    sizes = [leaf.size for leaf in jax.tree.leaves(attention_map)]
    assert max(sizes) < B * H * T * S


@pytest.mark.slow
def test_map_becomes_an_array(attention_map, weights):
    assert isinstance(weights, np.ndarray)
    np.testing.assert_array_equal(attention_map.weights(), weights)
    as_jax = jnp.asarray(attention_map)
    assert isinstance(as_jax, jax.Array)
    np.testing.assert_array_equal(as_jax, weights)
    halves = np.asarray(attention_map, np.float16)
    assert halves.dtype == np.float16
    np.testing.assert_array_equal(halves, weights.astype(np.float16))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(2, 6), slice(None)),
        (slice(-1, None, -3), slice(1, -1, 2)),
        (range(1, 7, 2), np.asarray([8, 0, 0, -2])),
        (np.asarray([-1, 3]), range(5)),
        (slice(0, 0), slice(None)),
        (range(0), range(9)),
    ],
)
def test_tile_is_a_rectangle_of_the_map(rows, columns, attention_map, weights):
    tile = jax.jit(lambda m: m.tile(rows, columns))(attention_map)
    np.testing.assert_allclose(
        tile, weights[..., rows, :][..., columns], rtol=2e-6, atol=1e-7
    )


def test_tile_takes_positions_that_are_not_known_yet(attention_map, weights):
    rows, columns = jnp.asarray([6, 0, 1]), jnp.asarray([8, 2])
    tile = jax.jit(lambda m, r, c: m.tile(r, c))(attention_map, rows, columns)
    expected = weights[..., rows, :][..., columns]
    np.testing.assert_allclose(tile, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("index", [np.asarray([0, 9]), range(-10, 0), jnp.arange(10)])
def test_tile_outside_of_the_map_is_refused(index, attention_map):
    with pytest.raises(ValueError, match=r"positions must be in -9..8, got"):
        attention_map.tile(slice(None), index)
    with pytest.raises(ValueError, match=r"positions must be in -7..6, got"):
        attention_map.tile(index, slice(None))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, r"one axis of integers, got int64 of shape \(\)"),
        (np.ones([2, 2], int), r"one axis of integers, got int64 of shape \(2, 2\)"),
        (np.asarray([0.0, 1.0]), "one axis of integers, got float64"),
        (np.asarray([True, False]), "one axis of integers, got bool"),
    ],
)
def test_a_tile_of_no_positions_is_refused(index, message, attention_map):
    with pytest.raises(ValueError, match=message):
        attention_map.tile(index, slice(None))


@pytest.mark.parametrize(
    ("size", "bins", "expected"),
    [(10, 3, [0, 4, 8, 10]), (5, 9, range(6)), (9, 4, [0, 3, 6, 9]), (7, 1, [0, 7])],
)
def test_bin_edges_are_equally_far_apart(size, bins, expected):
    np.testing.assert_array_equal(bin_edges(size, bins), expected)


@pytest.mark.parametrize(("size", "bins"), [(5, 0), (5, -1), (0, 5), (5, 1.5)])
def test_bins_and_positions_must_be_some(size, bins):
    with pytest.raises(ValueError, match="the number of .* must be an integer of at"):
        bin_edges(size, bins)


def stack_of(arrays):
    """Returns L inputs and L lengths."""
    inputs = arrays((L, B), T, S, H, G, K, V)
    return inputs, np.random.default_rng(0).integers(1, S + 1, [L, B])


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.vmap, jax.pmap])
def test_map_passes_into_and_out_of_maps_over_an_axis(transform, arrays):
    inputs, lengths = stack_of(arrays)
    stacked = jax.jit(transform(map_of))(inputs, lengths)
    assert isinstance(stacked, AttentionMap)
    assert stacked.shape == (L, B, H, T, S)
    each = jax.jit(lambda *a: map_of(*a).weights())
    expected = [each([x[i] for x in inputs], lengths[i]) for i in range(L)]
    weights = jax.jit(AttentionMap.weights)(stacked)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-7)
    tiles = transform(lambda m: m.tile(slice(2, 5), slice(None)))
    expected = np.asarray(expected)[..., 2:5, :]
    np.testing.assert_allclose(jax.jit(tiles)(stacked), expected, 2e-6, 1e-7)


@pytest.mark.slow
def test_map_passes_through_scan(arrays):
    inputs, lengths = stack_of(arrays)

    def step(total, x):
        found = map_of(*x)
        return total + found.weights(), found

    zero = jnp.zeros([B, H, T, S])
    total, stacked = jax.jit(lambda *x: lax.scan(step, zero, x))(inputs, lengths)
    assert stacked.shape == (L, B, H, T, S)
    weights = jax.jit(AttentionMap.weights)(stacked)
    np.testing.assert_allclose(total, weights.sum(0), rtol=5e-6, atol=1e-6)


@pytest.mark.slow
def test_an_empty_map_can_be_observed(arrays):
    mask = masks.causal() & masks.padding([0, 0])
    for num_queries, num_keys in ((0, 3), (2, 0)):
        inputs = arrays((B,), num_queries, num_keys, H, G, K, V)
        found = attend(*inputs, mask=mask)[1]
        numbers = jax.tree.leaves(found.statistics(per_query=True))
        assert not any(np.any(x) for x in numbers)
        np.testing.assert_array_equal(found.divergence(), np.zeros([B, H, H]))
        values = found.apply(jnp.ones((B, num_keys, 1, V)))
        np.testing.assert_array_equal(values, np.zeros([B, num_queries, H, V]))
        with pytest.raises(ValueError, match=r"in 0\.\.0, at least one"):
            found.pooled()
    with pytest.raises(ValueError, match="k must be an integer from 1 to 0, got 1"):
        found.top(1)


@pytest.mark.slow
def test_stacked_maps_with_positions_of_their_own_are_refused(inputs):
    query, key, value = inputs

    @jax.jit
    def maps(first_query):
        return attend(query, key, value, first_query=first_query)[1]

    stacked = jax.tree.map(lambda *x: jnp.stack(x), maps(2), maps(2))
    for ask in (AttentionMap.weights, AttentionMap.statistics, AttentionMap.apply):
        more = (jnp.ones((2, B, S, 1, V)),) if ask is AttentionMap.apply else ()
        with pytest.raises(ValueError, match=r"one first_query.*\(2,\).*jax\.vmap"):
            ask(stacked, *more)
    weights = jax.vmap(AttentionMap.weights)(stacked)
    np.testing.assert_array_equal(weights[1], maps(2).weights())
