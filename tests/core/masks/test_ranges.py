"""The part of a rectangle that a mask leaves out, and which masks are lopsided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from tests import everyday

T, S = 11, 13
MASKS = {
    "causal": masks.causal(),
    "window": masks.window(3, 1),
    "padding": masks.padding(jnp.array([9, 6])),
    "queries": masks.padding(jnp.array([9, 6]), jnp.array([7, 11])),
    "segments": masks.segments(jnp.arange(T)[None] // 4, jnp.arange(S)[None] // 4),
    "both": masks.window(None, 2) & ~masks.padding(jnp.array([2, 3])),
    "union": masks.causal() | masks.padding(jnp.array([4, 0])),
    "function": masks.causal() & masks.where(lambda t, s: (t - s) % 2 == 1),
    "complement": ~masks.causal(),
    "array": masks.dense(np.random.default_rng(0).random((2, 3, T, S)) < 0.5),
}


@pytest.mark.parametrize(
    "at", everyday.some(map(pytest.param, [(4, 7), (0, 0), (7, 3)]), 1), ids=str
)
@pytest.mark.parametrize("name", MASKS)
def test_ranges_are_those_of_any_rectangle(name, at):
    mask, (first_query, first_key) = MASKS[name], at
    last_query, last_key = first_query + 4, first_key + 5
    found = np.asarray(
        mask.tile(range(first_query, last_query), range(first_key, last_key))
    )
    for i in range(4):
        rows, keys = (first_query + i, last_query), (first_key, last_key)
        seen = found[..., i:, :]
        low, high = (int(x) - first_key for x in mask.key_range(rows, keys))
        assert 0 <= low <= high <= 5
        assert not seen[..., :low].any() and not seen[..., high:].any()
        open_range = jax.jit(lambda mask, *ends: mask.open_range(*ends))
        low, high = (int(x) - first_key for x in open_range(mask, rows, keys))
        assert 0 <= low <= high <= 5
        assert seen[..., low:high].all()


@pytest.mark.parametrize(("query_id", "is_seen"), [(3, False), (5, True)])
def test_one_segment_of_all_keys_is_open_to_its_queries_alone(query_id, is_seen):
    mask = masks.segments(jnp.full(T, query_id), jnp.array([5]))
    start, stop = mask.open_range((2, 4), (3, 9))
    assert (int(start), int(stop)) == ((3, 9) if is_seen else (3, 3))
