"""Attention and its map where scores are far larger than what a row's sum adds.

Next to a score of 1e6, float32 has no room for the log of the number of keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, devices, masks
from mha_haiku.core import tiles
from mha_haiku.core.attention.normalizers import LogSum
from tests import everyday, oracles

B, T, S, H, G, K, V = 2, 4, 8, 4, 2, 3, 5
LOWEST = float(np.finfo(np.float32).min)
IMPLEMENTATIONS = {
    "dense": "dense",
    "formula": "formula",
    "blockwise": attention.Blockwise(3, 2, 2),
    "one tile": attention.Blockwise(16, 16),
}


def _inputs():
    rng = np.random.default_rng(0)
    shapes = (B, T, H, K), (B, S, G, K), (B, S, G, V)
    return tuple(jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes)


def _row_of(number):
    """Returns a bias that gives all keys of query 1 a number, and query 2 half."""
    bias = np.zeros((B, T, S), np.float32)
    bias[:, 1] = number
    bias[:, 2, ::2] = number
    return bias


BIASES = {
    "as a mask": _row_of(-1e9),
    "the lowest float": _row_of(LOWEST),
    "below what was hidden": _row_of(-3e30),
    "large": _row_of(2.0**23),
    "minus infinity": _row_of(-np.inf),
    "half of it": np.where(np.arange(S) % 3 == 0, LOWEST, _row_of(-1e9)),
}


def _wanted(arrays, bias, **stated):
    """Returns the oracle's attention on the scores that float32 can hold."""

    def tap(scores):
        return scores.astype(np.float32).astype(np.float64)

    allowed = np.broadcast_to((bias > -np.inf)[:, None], (B, H, T, S))
    finite = np.where(bias > -np.inf, bias, 0).astype(np.float64)[:, None]
    options = {"allowed": allowed, "bias": finite, "tap": tap} | stated
    return oracles.attention(*arrays, **options)


@functools.cache
def _program(implementation, **options):
    by = IMPLEMENTATIONS[implementation]
    options = {name: jnp.asarray(x) for name, x in options.items()}

    @jax.jit
    def run(query, key, value, bias):
        def total(query, key, value, bias):
            normalizer = attention.sink(options["sinks"]) if options else None
            values, found = attention.attend(
                query, key, value, bias=bias, implementation=by, normalizer=normalizer
            )
            return values.sum(), (values, found)

        gradients, (values, found) = jax.grad(total, (0, 1, 2, 3), has_aux=True)(
            query, key, value, bias
        )
        statistics = found.statistics(pooled=(2, 3))
        return {
            "values": values,
            "weights": found.weights(),
            "sums": found.row_sums(),
            "entropy": statistics.entropy,
            "largest": statistics.largest_weight,
            "max_score": statistics.max_score,
            "top": found.top(2).weights,
            "outputs": found.outputs(),
            "gradients": gradients,
        }

    return run


@pytest.mark.parametrize("name", everyday.some(BIASES, 2))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_statistics_and_gradients_are_right_at_any_size(implementation, name):
    arrays, bias = _inputs(), BIASES[name]
    found = _program(implementation)(*arrays, bias)
    wanted = _wanted(arrays, bias)
    weights = wanted.weights
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    close(found["values"], wanted.values)
    close(found["weights"], weights)
    close(found["outputs"], wanted.values)
    close(found["sums"], weights.sum(-1))
    expected = oracles.map_statistics(weights)
    close(found["entropy"], expected["entropy"])
    close(found["largest"], expected["largest_weight"])
    scores = wanted.logsumexp + np.log(np.maximum(weights.max(-1), 1e-99))
    close(found["max_score"], scores.max(-1))
    close(found["top"], -np.sort(-weights)[..., :2])
    # By hand: of the sum of all values, what a weight and a score are worth.
    values = np.asarray(arrays[2], np.float64).repeat(H // G, -2)
    worth = values.sum(-1).swapaxes(-1, -2)[..., None, :]  # [B, H, 1, S]
    slopes = weights * (worth - (weights * worth).sum(-1, keepdims=True))
    received = weights.sum(-2).reshape(B, G, H // G, S).sum(2)  # [B, G, S]
    *_, value_grad, bias_grad = found["gradients"]
    close(value_grad[..., 0], received.swapaxes(-1, -2), rtol=1e-5)
    close(bias_grad, slopes.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("sink", [0.0, 2.0**23, LOWEST])
def test_a_sink_is_a_score_more_of_any_size(implementation, sink):
    arrays, bias = _inputs(), BIASES["large"]
    sinks = np.full(H, sink, np.float32)
    found = _program(implementation, sinks=tuple(sinks))(*arrays, bias)
    wanted = _wanted(arrays, bias, sinks=sinks.astype(np.float64))
    for name in ("values", "weights"):
        np.testing.assert_allclose(found[name], getattr(wanted, name), 2e-6, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("axis", ["data", "heads", "sequence"])
def test_devices_share_rows_of_any_size(axis, is_compiled):
    arrays, bias = _inputs(), BIASES["as a mask"]
    sizes = dict.fromkeys(("data", "heads", "sequence"), 1) | {axis: 2}
    mesh = devices.make_mesh(jax.local_devices()[:2], **sizes)

    def run(*arrays):
        values, found = attention.attend(
            *arrays, bias=bias, implementation=attention.Sharded(mesh)
        )
        return values, found.weights(), found.statistics().entropy

    run = jax.jit(run) if is_compiled else run
    values, weights, entropy = run(*arrays)
    wanted = _wanted(arrays, bias)
    np.testing.assert_allclose(values, wanted.values, 2e-6, 2e-6)
    np.testing.assert_allclose(weights, wanted.weights, 2e-6, 2e-6)
    expected = oracles.map_statistics(wanted.weights)["entropy"]
    np.testing.assert_allclose(entropy, expected, 2e-6, 2e-6)


@pytest.mark.slow
def test_a_row_of_a_cache_has_weights_of_any_size():
    query, key, value = _inputs()
    cache = attention.Cache(jnp.moveaxis(key, -3, -1), jnp.moveaxis(value, -3, -2))
    bias = jnp.full((B, S, S), -1e9)
    origin = tiles.Origin(S - 1)
    weighting = attention.Weighting(masks.causal(), bias, origin=origin)
    values, row, _ = cache.attend(query[:, :1], key[:, -1:], value[:, -1:], weighting)
    np.testing.assert_allclose(row.weights().sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(row.outputs(), values, rtol=1e-5, atol=1e-6)


def test_sums_of_nothing_add_nothing():
    nothing = LogSum.rounded(jnp.array([-jnp.inf, -jnp.inf]))
    one = LogSum.of(jnp.array([1e9, -jnp.inf]), jnp.array([3.0, 0.0]))
    both = nothing.plus(one)
    assert both.logsumexp[1] == -jnp.inf and both.remainder[1] == 0
    np.testing.assert_allclose(one.over(both), [1, 0])
    twice = one.plus(one)
    np.testing.assert_allclose(one.over(twice)[0], 0.5, rtol=1e-6)
