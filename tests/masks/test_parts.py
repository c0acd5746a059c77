"""A part of a mask is that rectangle of it, and knows what it leaves out."""

import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks

T, S = 11, 13
MASKS = {
    "causal": masks.causal(),
    "window": masks.window(3, 1),
    "global": masks.global_tokens([5]),
    "padding": masks.padding(jnp.array([9, 6])),
    "queries": masks.padding(jnp.array([9, 6]), jnp.array([7, 11])),
    "segments": masks.segments(jnp.arange(T)[None] // 4, jnp.arange(S)[None] // 4),
    "both": masks.causal().shifted(2) & ~masks.padding(jnp.array([2, 3])),
    "array": masks.dense(np.random.default_rng(0).random((2, 3, T, S)) < 0.5),
}


@pytest.mark.parametrize("at", [(0, 0), (4, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_part_is_a_rectangle(name, at):
    mask, (first_query, first_key) = MASKS[name], at
    num_queries, num_keys = 4, 5
    part = masks.Part(mask, jnp.array(first_query), jnp.array(first_key), num_keys, S)
    rows = range(first_query, first_query + num_queries)
    wanted = np.asarray(mask.tile(rows, range(first_key, first_key + num_keys)))
    found = np.asarray(part.tile(range(num_queries), range(num_keys)))
    np.testing.assert_array_equal(found, wanted)

    for start in range(num_queries):
        ends = (start, num_queries)
        seen = found[..., start:, :]
        low, high = (int(x) for x in part.key_range(ends, num_keys))
        assert 0 <= low <= high <= num_keys
        assert not seen[..., :low].any() and not seen[..., high:].any()
        low, high = (int(x) for x in part.open_range(ends, num_keys))
        assert 0 <= low <= high <= num_keys
        assert seen[..., low:high].all()


def test_which_masks_show_more_to_some_queries():
    assert masks.causal().is_lopsided()
    assert (~masks.causal().shifted(3)).is_lopsided()
    assert (masks.causal() & masks.padding(jnp.array([2]))).is_lopsided()
    assert masks.prefix(jnp.array([2])).is_lopsided()
    assert masks.window(None, 3).is_lopsided()
    assert not masks.window(2, 3).is_lopsided()
    assert not masks.padding(jnp.array([2])).is_lopsided()
    assert not masks.full().is_lopsided()
