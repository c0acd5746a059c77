"""Attention at random, against the float64 oracle: masks, biases, scores, dtypes.

B... batch axes, T queries, S keys, H query heads, G key heads, K query/key and V value
size.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from mha_haiku import masks, positions
from mha_haiku.core.attention import additive
from mha_haiku.core.attention import dot_product as dot_product_score
from mha_haiku.core.masks import relative

# (batch, T, S, H, G, K, V): few, as each new shape compiles anew.
SIZES = [
    ((2,), 3, 5, 4, 2, 6, 7),
    ((), 5, 4, 3, 3, 2, 1),
    ((3, 2), 1, 6, 2, 1, 5, 4),
    ((1,), 4, 2, 6, 2, 3, 5),
]
# The other dtypes of one size alone, for the same reason.
KINDS = [(sizes, jnp.float32) for sizes in SIZES] + [
    (SIZES[0], dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float64)
]


def random_mask(kind, rng, batch, num_queries, num_keys, num_heads):
    """Returns a mask and the same as booleans that broadcast to `[B..., H, T, S]`."""
    rows, columns = np.arange(num_queries)[:, None], np.arange(num_keys)
    if kind == "causal":
        offset = int(rng.integers(-1, num_keys))
        return relative.Band(None, offset), columns <= rows + offset
    if kind == "window":
        left, right = map(int, rng.integers(0, 3, 2))
        distance = columns - rows
        return masks.window(left, right), (-left <= distance) & (distance <= right)
    if kind == "padding":
        lengths = np.asarray(rng.integers(0, num_keys + 1, batch))
        return masks.padding(lengths), columns < lengths[..., None, None, None]
    if kind == "valid lens":
        lengths = rng.integers(0, num_keys + 1, (*batch, num_queries))
        return masks.valid_lens(lengths), columns < lengths[..., None, :, None]
    if kind == "segments":
        ids, others = (
            rng.integers(0, 2, (*batch, size)) for size in (num_queries, num_keys)
        )
        same = ids[..., None, :, None] == others[..., None, None, :]
        return masks.segments(ids, others), same
    shape = (*batch, num_heads, num_queries, num_keys)
    array = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    return masks.dense(array), array


MASKS = ["causal", "window", "padding", "valid lens", "segments", "dense"]


@st.composite
def cases(draw, kinds):
    """Returns inputs as a dtype, options of `attend` and the same for the oracle."""
    (batch, T, S, H, G, K, V), dtype = draw(st.sampled_from(kinds))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    options, stated = {}, {}
    parts = draw(st.lists(st.sampled_from(MASKS), max_size=2))
    for kind in parts:
        mask, allowed = random_mask(kind, rng, batch, T, S, H)
        if draw(st.booleans()):
            mask, allowed = ~mask, ~allowed
        if "mask" not in options:
            options["mask"], stated["allowed"] = mask, allowed
        elif draw(st.booleans()):
            options["mask"], stated["allowed"] = (
                options["mask"] & mask,
                stated["allowed"] & allowed,
            )
        else:
            options["mask"], stated["allowed"] = (
                options["mask"] | mask,
                stated["allowed"] | allowed,
            )
    bias = draw(st.sampled_from([None, "dense", "example", "alibi"]))
    if bias == "alibi":
        options["bias"] = positions.alibi(H)
        distance = np.abs(np.arange(T)[:, None] - np.arange(S))
        slopes = np.asarray(options["bias"].slopes, np.float64)
        stated["bias"] = -slopes[:, None, None] * distance
    elif bias:
        heads = (H,) if bias == "dense" else ()
        array = rng.normal(size=(*batch, *heads, T, S)).astype(np.float32)
        options["bias"] = array
        stated["bias"] = array if heads else array[..., None, :, :]
    score = draw(st.sampled_from([None, "soft cap", "additive"]))
    if score == "soft cap":
        scale, cap = draw(st.sampled_from([0.0, 0.3, 2.0])), 1.5
        options["score"] = dot_product_score(scale=scale, soft_cap=cap)
        stated["score"] = lambda q, k, h: cap * np.tanh(scale * (q @ k) / cap)
    elif score == "additive":
        weight = rng.normal(size=[H, K]).astype(np.float32)
        options["score"] = additive(weight)
        stated["score"] = lambda q, k, h: weight[h].astype(float) @ np.tanh(q + k)
    return (batch, T, S, H, G, K, V), dtype, seed, options, stated


def compare(case, arrays, check):
    sizes, dtype, seed, options, stated = case
    with jax.enable_x64(dtype == jnp.float64):
        inputs = arrays(*sizes, dtype=dtype, seed=seed)
        # Not compiled as a whole: each mask's structure would compile anew. Nor is the
        # formula, whose values equal the values of the dense implementation.
        options = options | {"implementation": "formula"}
        check(inputs, options, stated, dtype=dtype, compiled=lambda function: function)


@hypothesis.settings(max_examples=25)
@hypothesis.given(case=cases(KINDS[:1]))
def test_attention_equals_the_oracle(case, arrays, check):
    compare(case, arrays, check)


@pytest.mark.slow
@hypothesis.settings(max_examples=150)
@hypothesis.given(case=cases(KINDS))
def test_attention_equals_the_oracle_in_many_cases(case, arrays, check):
    compare(case, arrays, check)
