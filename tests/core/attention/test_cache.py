"""Attention over a cache against the float64 oracle, position by position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks, positions
from mha_haiku.core import tiles
from tests import everyday, oracles

# Prompts of up to P positions, texts of up to S.
B, P, S, H, G, K, V = 3, 5, 9, 4, 2, 6, 7
LENGTHS = np.array([2, 5, 3])
GENERATOR = np.random.default_rng(0)
QUERY = GENERATOR.standard_normal((B, S, H, K)).astype(np.float32)
KEY = GENERATOR.standard_normal((B, S, G, K)).astype(np.float32)
VALUE = GENERATOR.standard_normal((B, S, G, V)).astype(np.float32)

SINKS = np.array([-1.0, 0.5, 2.0, 0.0], np.float32)
GATES = GENERATOR.uniform(size=(B, S, H, V)).astype(np.float32)
SLOPES = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])
DISTANCE = np.arange(S)[:, None] - np.arange(S)


def _prompt(*arrays):
    """The prompts, with NaN in their padding."""
    is_valid = (np.arange(P) < LENGTHS[:, None])[..., None, None]
    return [np.where(is_valid, x[:, :P], np.float32(np.nan)) for x in arrays]


def _prefilled(mask, gates=None, **options):
    prompt = attention.Prompt(LENGTHS, S)
    gates = None if gates is None else gates[:, :P]
    weighting = attention.Weighting(mask, gates=gates, **options)
    return prompt.attend(*_prompt(QUERY, KEY, VALUE), weighting)


@functools.partial(jax.jit, static_argnames="mask")
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, 0, None, None, 0))
def _step(cache, query, key, value, position, mask, options, gates):
    at = lambda x: jax.lax.dynamic_slice_in_dim(x, position, 1)  # noqa: E731
    gates = None if gates is None else at(gates)
    values, row, cache = cache.attend(
        at(query),
        at(key),
        at(value),
        attention.Weighting(
            mask, gates=gates, origin=tiles.Origin(position), **options
        ),
    )
    return values, row.weights(), cache


DOT_PRODUCT = (
    attention.dot_product(0.3, 2.0),
    functools.partial(oracles.dot_product, scale=0.3, soft_cap=2.0),
)
SIGMOID = (
    attention.sigmoid(0.3, -1.0),
    functools.partial(oracles.log_sigmoid, scale=0.3, offset=-1.0),
)
# By the window: the score, the normalizer, and the oracle's words for the latter.
KINDS = {
    None: (DOT_PRODUCT, None, {}),
    3: (DOT_PRODUCT, attention.sink(SINKS), {"sinks": SINKS}),
    6: (SIGMOID, attention.unnormalized(), {"is_normalized": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("window", everyday.some([None, 6, 3], 2))
def test_each_new_query_attends_as_among_all(window):
    mask = masks.window(window, 0) if window else masks.causal()
    (score, stated_score), normalizer, stated = KINDS[window]
    options = {"bias": positions.alibi(H), "score": score, "normalizer": normalizer}
    bias = -SLOPES[:, None, None] * np.abs(DISTANCE)
    allowed = (DISTANCE >= 0) & (DISTANCE <= (window or S))
    wanted = oracles.attention(
        QUERY, KEY, VALUE, allowed=allowed, bias=bias, score=stated_score, **stated
    )
    gates = GATES if window else None
    if gates is not None:
        wanted = wanted._replace(values=wanted.values * gates)

    values, _, cache = _prefilled(mask, gates, **options)
    assert cache.key.shape == (B, G, K, S)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(values[b, :n], wanted.values[b, :n], atol=1e-5)
    for i in range(S - LENGTHS.max()):
        at = LENGTHS + i
        values, weights, cache = _step(
            cache, QUERY, KEY, VALUE, at, mask, options, gates
        )
        for b, t in enumerate(at):
            np.testing.assert_allclose(values[b, 0], wanted.values[b, t], atol=1e-5)
            own = wanted.weights[b, :, t]
            np.testing.assert_allclose(weights[b, :, 0], own, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "given", "message"),
    [
        (2, {}, "one query at a time, got 2"),
        (1, {"score": "dot"}, "score must be None, a function"),
        (1, {"normalizer": "softmax"}, "normalizer must be None or a Norm"),
    ],
)
def test_what_a_cache_does_not_take_is_refused(count, given, message):
    *_, cache = _prefilled(masks.causal())
    parts = (x[:, :count] for x in (QUERY, KEY, VALUE))
    with pytest.raises((TypeError, ValueError), match=message):
        cache.attend(
            *parts, attention.Weighting(masks.causal(), origin=tiles.Origin(5), **given)
        )


def test_a_text_has_room_for_the_size_of_its_cache():
    *_, cache = _prefilled(masks.causal())
    weighting = attention.Weighting(masks.causal(), origin=tiles.Origin(S))
    with pytest.raises(ValueError, match=f"first_query must be below {S}, .*, got {S}"):
        cache.attend(*(x[:, :1] for x in (QUERY, KEY, VALUE)), weighting)


def test_what_stands_in_unwritten_slots_changes_no_bit():
    *_, cache = _prefilled(masks.causal())
    is_free = np.arange(S) >= LENGTHS[:, None]
    other = dataclasses.replace(
        cache,
        key=jnp.where(is_free[:, None, None], 7.0, cache.key),
        value=jnp.where(is_free[:, None, :, None], 7.0, cache.value),
    )
    found, wanted = (
        _step(each, QUERY, KEY, VALUE, LENGTHS, masks.causal(), {}, None)[:2]
        for each in (other, cache)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
