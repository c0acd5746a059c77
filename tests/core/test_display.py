"""The repr of objects: a line or two, also while they are traced."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks

B, T, S, H, G, K, V = 2, 5, 7, 4, 2, 3, 6
LONGEST = 320  # four lines of a terminal

MASKS = [
    masks.full(),
    masks.causal(),
    ~masks.causal(),
    masks.window(2, 1) & masks.padding([3, 7]),
    (masks.causal() | masks.padding([2, 1])) & ~masks.window(2, 0),
    ~(masks.causal() & masks.window(2, None)) | masks.padding([0, 3]),
    masks.window(None, 2),
    masks.padding([3, 4], [1, 2]),
]


@pytest.fixture(scope="module")
def attention_map():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(B, T, H, K)).astype(np.float32)
    key = rng.normal(size=(B, S, G, K)).astype(np.float32)
    value = rng.normal(size=(B, S, G, V)).astype(np.float32)
    mask = masks.causal() & masks.padding(jnp.asarray([3, 7]))
    return attention.attend(query, key, value, mask=mask, first_query=2)[1]


@pytest.mark.slow
def test_pages_are_there_at_once_and_imported_when_asked_for():
    code = (
        "import sys, mha_haiku as mh;"
        "pages = 'mha_haiku.showing.readings';"
        "assert pages not in sys.modules;"
        "assert '<' in mh.masks.causal()._repr_html_() and pages in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_mask_says_the_expression_that_makes_it(mask):
    same = eval(repr(mask), vars(masks))
    np.testing.assert_array_equal(same.array(T, S), mask.array(T, S))
    assert repr(same) == repr(mask)


def test_arrays_of_a_mask_are_shown_by_their_shape():
    ids = np.zeros([B, S], int)
    assert repr(masks.segments(ids)) == "segments(int64[2,7])"
    assert repr(masks.segments(ids[:, :T], ids)) == "segments(int64[2,5], int64[2,7])"
    assert repr(masks.dense(np.ones([T, S], bool))) == "dense(bool[5,7])"
    assert repr(masks.padding(np.arange(20))) == "padding(int64[20])"


@pytest.mark.slow
def test_a_map_says_shape_dtype_mask_and_range(attention_map):
    text = repr(attention_map)
    assert text.startswith("AttentionMap(float32[2,4,5,7] [B..., H, T, S] in [0, 1]")
    for part in ("causal() & padding([3, 7])", "key float32[2,7,2,3]", "first_query 2"):
        assert part in text
    assert len(text) < LONGEST


def test_what_is_traced_says_its_shape_and_is_not_computed(attention_map):
    said = []

    @jax.jit
    def traced(maps):
        said.extend([repr(maps), repr(maps.statistics()), repr(maps.top(2)[0].shape)])
        return maps.logsumexp

    eqns = jax.make_jaxpr(lambda maps: (repr(maps), maps.logsumexp)[1])(attention_map)
    assert not eqns.eqns
    traced(attention_map)
    assert "float32[2,4,5,7]" in said[0]
    assert "padding(int32[2])" in said[0]
    assert "float32[2,4]" in said[1]
    jax.vmap(lambda maps: said.append(repr(maps)) or maps.logsumexp)(attention_map)
    assert "float32[4,5,7]" in said[-1]
    assert all(len(text) < LONGEST for text in said)


def test_a_map_of_other_things_than_arrays_says_something(attention_map):
    axes = jax.tree.map(lambda _: 0, attention_map)
    assert repr(axes).startswith("AttentionMap(query=0")
    shapes = jax.eval_shape(lambda x: x, attention_map)
    assert "float32[2,4,5,7]" in repr(shapes)
    deleted = jax.tree.map(jnp.array, attention_map)
    jax.tree.map(lambda x: x.delete(), deleted)
    assert "padding(int32[2])" in repr(deleted)


@pytest.mark.slow
def test_statistics_say_what_they_have_and_what_is_missing(attention_map):
    text = repr(attention_map.statistics(pooled=(2, 3), per_query=True))
    for part in ("float32[2,4]", "per query float32[2,4,5]", "pooled float32[2,4,2,3]"):
        assert part in text
    assert text.endswith("without chosen_positions, same_token, after_same_token)")
    assert len(text) < LONGEST
    leaves, structure = jax.tree.flatten(attention_map.statistics())
    assert repr(jax.tree.unflatten(structure, leaves)).startswith("Statistics(16 of")
