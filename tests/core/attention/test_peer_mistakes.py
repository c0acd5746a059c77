"""Mistakes of other implementations of attention, with a test for each.

Fully masked rows are attended to uniformly or become NaN; NaN in a masked key reaches
valid outputs and gradients; float masks are silently inverted; masks `[B, S]` are read
as `[T, S]` where sizes agree. That empty batches raise, that float64 loses its
precision, and which masks are refused, is in `test_attend.py`.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import attend
from tests import oracles

B, T, S, H, G, K, V = 2, 3, 5, 4, 2, 6, 7
LENGTHS = np.asarray([5, 3])
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


def results(query, key, value, chosen, mask):
    """Returns values, logsumexp, weights and the gradients of a sum over all of them.

    Args:
      query: `[B, T, H, K]`.
      key: `[B, S, G, K]`.
      value: `[B, S, G, V]`.
      chosen: `[B, T, H, V]`, the cotangent of the values.
      mask: Anything that `attend` takes.
    """

    def loss(query, key, value):
        values, found = attend(query, key, value, mask=mask)
        logsumexp = jnp.where(found.logsumexp == -jnp.inf, 0, found.logsumexp)
        total = (values.astype(jnp.float32) * chosen).sum() + logsumexp.sum()
        squares = (found.weights() ** 2).sum()
        return total + squares, (values, found.logsumexp, found.weights())

    differentiate = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, found = differentiate(query, key, value)
    return *found, gradients


@pytest.fixture(scope="module")
def chosen():
    return np.random.default_rng(4).normal(size=[B, T, H, V]).astype(np.float32)


# Without jit each operation compiles by itself, so only one dtype.
everywhere = pytest.mark.parametrize(
    ("dtype", "run"),
    [
        pytest.param(dtype, jax.jit(results), id=f"{dtype.__name__}-jit")
        for dtype in DTYPES
    ]
    + [pytest.param(jnp.float32, results, id="float32-eager", marks=pytest.mark.slow)],
)


@everywhere
def test_fully_masked_row_attends_to_nothing(dtype, run, arrays, chosen):
    inputs = arrays((B,), T, S, H, G, K, V, dtype=dtype)
    allowed = np.random.default_rng(0).random([B, H, T, S]) < 0.7
    allowed[:, :, 1] = False  # one query of every head
    allowed[1, 2] = False  # every query of one head
    values, logsumexp, weights, gradients = run(*inputs, chosen, allowed)
    blind = ~allowed.any(-1)
    assert (np.asarray(logsumexp)[blind] == -np.inf).all()
    assert not np.asarray(weights)[blind].any()
    blind_values = np.moveaxis(blind, 1, 2)
    assert not np.asarray(values, np.float32)[blind_values].any()
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)
    assert not np.asarray(gradients[0], np.float32)[blind_values].any()
    # The other rows are as if the blind ones were not there.
    reference = oracles.attention(*inputs, allowed=allowed)
    np.testing.assert_allclose(weights, reference.weights, 3e-5, 3e-6)


@everywhere
def test_everything_masked_gives_zeros_and_zero_gradients(dtype, run, arrays, chosen):
    inputs = arrays((B,), T, S, H, G, K, V, dtype=dtype)
    mask = np.zeros([B, H, T, S], bool)
    values, logsumexp, weights, gradients = run(*inputs, chosen, mask)
    assert values.dtype == dtype
    assert not np.asarray(values, np.float32).any()
    assert not np.asarray(weights).any()
    assert (np.asarray(logsumexp) == -np.inf).all()
    assert not any(np.asarray(g, np.float32).any() for g in gradients)


@everywhere
def test_nan_in_a_masked_key_or_value_changes_no_bit(dtype, run, arrays, chosen):
    query, key, value = arrays((B,), T, S, H, G, K, V, dtype=dtype)
    mask = masks.padding(LENGTHS, query_lengths=np.asarray([3, 2]))
    beyond = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
    expected = run(query, key, value, chosen, mask)
    assert any(np.asarray(g, np.float32).any() for g in expected[-1])
    for fault in (np.nan, np.inf, -np.inf):
        faulty = [jnp.where(beyond, fault, x).astype(dtype) for x in (key, value)]
        blind_query = query.at[1, 2].set(fault)
        found = run(blind_query, *faulty, chosen, mask)
        for array, wanted in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
        ):
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(array, wanted)


@everywhere
def test_nan_that_some_may_see_is_felt_by_them_alone(dtype, run, arrays, chosen):
    query, key, value = arrays((B,), T, S, H, G, K, V, dtype=dtype)
    mask = masks.window(None, 1)  # queries 0, 1, 2 see 2, 3, 4 keys
    expected = run(query, key, value, chosen, mask)
    for faulty in (
        (query, key.at[1, 3, 1, 0].set(np.nan), value),
        (query, key, value.at[1, 3, 1, 0].set(np.inf)),
    ):
        values, logsumexp, weights, _ = run(*faulty, chosen, mask)
        # Key 3 of the second example's second group of heads is seen from query 2 on.
        feels = np.zeros([B, T, H], bool)
        feels[1, 2, 2:] = True
        assert np.isnan(np.asarray(values, np.float32)[feels]).all()
        np.testing.assert_array_equal(
            np.asarray(values, np.float32)[~feels],
            np.asarray(expected[0], np.float32)[~feels],
        )
        for found, wanted in ((logsumexp, expected[1]), (weights, expected[2])):
            found, wanted = (np.moveaxis(x, 1, 2) for x in (found, wanted))
            np.testing.assert_array_equal(found[~feels], wanted[~feels])
            assert np.isnan(found[feels]).any()
