"""ALiBi and T5, against exact arithmetic and hand-made numbers.

T queries, S keys, H heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import positions

T, S, H = 4, 7, 3


def tile_of(bias, first_query=0, *, batch_ndim=0):
    """Returns a bias for T queries and S keys, `[B..., H, T, S]`."""
    rows = first_query + np.arange(T)
    return bias.aligned(batch_ndim).aligned_tile(rows, np.arange(S))


def bucket_of(distance, num_buckets, bidirectional, max_distance):
    """Returns T5's bucket of s - t in exact integer arithmetic."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    num_exact = num_buckets // 2
    if distance < num_exact:
        return first + distance
    num_far, step = num_buckets - num_exact, 0
    # The largest step with distance >= num_exact (max_distance / num_exact)^(step/far).
    while step + 1 < num_far and distance**num_far * num_exact ** (
        step + 1
    ) >= num_exact**num_far * max_distance ** (step + 1):
        step += 1
    return first + num_exact + step


def test_alibi_slopes_are_those_of_the_paper():
    halves = [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(positions.alibi(8).slopes, halves, rtol=1e-7)
    six = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    np.testing.assert_allclose(positions.alibi(6).slopes, six, rtol=1e-7)
    np.testing.assert_allclose(positions.alibi(1).slopes, [2**-8], rtol=1e-7)


@pytest.mark.parametrize("offset", [0, 3, -2])
@pytest.mark.parametrize("batch_ndim", [0, 2])
def test_alibi_falls_with_the_distance(offset, batch_ndim):
    slopes = np.asarray([2**-4, 2**-8, 2**-2])
    distance = np.abs(np.arange(T)[:, None] + offset - np.arange(S))
    found = tile_of(positions.alibi(H), offset, batch_ndim=batch_ndim)
    assert found.shape == (1,) * batch_ndim + (H, T, S)
    expected = -slopes[:, None, None] * distance
    np.testing.assert_allclose(found.reshape(H, T, S), expected, rtol=1e-6)


@pytest.mark.parametrize("num_heads", [0, -1, 2.0])
def test_alibi_needs_a_number_of_heads(num_heads):
    with pytest.raises(ValueError, match="num_heads must be an integer of at least 1"):
        positions.alibi(num_heads)


BUCKETS = [(32, True, 128), (32, False, 128), (8, True, 20), (7, False, 11)]


@pytest.mark.parametrize(("num_buckets", "bidirectional", "max_distance"), BUCKETS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_relative_buckets_are_those_of_t5(
    num_buckets, bidirectional, max_distance, transform
):
    bias = positions.relative_bias(
        np.zeros([num_buckets, H]),
        bidirectional=bidirectional,
        max_distance=max_distance,
    )
    distance = np.arange(-300, 301)
    expected = [
        bucket_of(int(d), num_buckets, bidirectional, max_distance) for d in distance
    ]
    np.testing.assert_array_equal(transform(bias.buckets)(distance), expected)


def test_relative_buckets_written_by_hand():
    bias = positions.relative_bias(np.zeros([32, H]), bidirectional=True)
    distance = np.asarray([-200, -128, -64, -8, -7, -1, 0, 1, 7, 8, 20, 127, 500])
    expected = [15, 15, 14, 8, 7, 1, 0, 17, 23, 24, 26, 31, 31]
    np.testing.assert_array_equal(bias.buckets(distance), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("batch_ndim", [0, 2])
def test_relative_bias_is_the_tables_row_of_the_bucket(
    bidirectional, offset, batch_ndim
):
    table = np.random.default_rng(0).normal(size=[8, H]).astype(np.float32)
    bias = positions.relative_bias(table, bidirectional=bidirectional, max_distance=5)
    found = tile_of(bias, offset, batch_ndim=batch_ndim)
    assert found.shape == (1,) * batch_ndim + (H, T, S)
    expected = [
        [
            [table[bucket_of(s - t - offset, 8, bidirectional, 5), h] for s in range(S)]
            for t in range(T)
        ]
        for h in range(H)
    ]
    np.testing.assert_array_equal(found.reshape(H, T, S), expected)


def test_gradient_of_the_relative_table_counts_the_pairs_of_each_bucket():
    def total(table):
        bias = positions.relative_bias(table, bidirectional=True, max_distance=5)
        return (tile_of(bias) * np.arange(1.0, H + 1)[:, None, None]).sum()

    counts = np.zeros(8)
    for t in range(T):
        for s in range(S):
            counts[bucket_of(s - t, 8, True, 5)] += 1
    gradient = jax.grad(total)(jnp.zeros([8, H]))
    np.testing.assert_allclose(gradient, counts[:, None] * np.arange(1.0, H + 1))


@pytest.mark.parametrize(
    ("shape", "bidirectional", "max_distance", "message"),
    [
        ((8,), True, 9, r"table must be \[buckets, H\], got shape \(8,\)"),
        ((2, 8, H), True, 9, r"table must be \[buckets, H\], got shape \(2, 8, 3\)"),
        ((3, H), True, 9, "at least 4 buckets where bidirectional is True, got 3"),
        ((1, H), False, 9, "at least 2 buckets where bidirectional is False, got 1"),
        ((8, H), True, 2, "max_distance must be an integer of at least 3, got 2"),
        ((8, H), False, 4, "max_distance must be an integer of at least 5, got 4"),
    ],
)
def test_relative_tables_without_buckets_are_refused(
    shape, bidirectional, max_distance, message
):
    with pytest.raises(ValueError, match=message):
        positions.relative_bias(
            jnp.zeros(shape), bidirectional=bidirectional, max_distance=max_distance
        )


def test_biases_of_other_heads_are_refused():
    with pytest.raises(ValueError, match="ALiBi bias has 3 heads, but attention has 2"):
        positions.alibi(3).check((), 2, T, S)
    table = positions.relative_bias(jnp.zeros([8, 3]), bidirectional=True)
    with pytest.raises(ValueError, match="relative bias has 3 heads, .* has 2"):
        table.check((), 2, T, S)
