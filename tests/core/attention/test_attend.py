"""The numbers of attention, against the float64 oracle and by hand; its refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import Blockwise, attend, sink
from mha_haiku.core.attention import dot_product as dot_product_score
from tests.core.attention.rated_score import Rated

B, T, S, H, G, K, V = 2, 3, 5, 4, 2, 6, 7
rng = np.random.default_rng(1)
LENGTHS = np.asarray([4, 2])
WITHIN = (np.arange(S) < LENGTHS[:, None])[:, None, None]
CAUSAL = np.arange(S) <= np.arange(T)[:, None]
HEAD_MASK = rng.random([B, H, T, S]) < 0.6
EXAMPLE_MASK = rng.random([B, T, S]) < 0.6
BIAS = rng.normal(size=[B, H, T, S]).astype(np.float32)
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(S))

# What `attend` is told, and the same for the oracle.
CASES = {
    "nothing": ({}, {}),
    "causal": ({"mask": masks.causal()}, {"allowed": CAUSAL}),
    "padding": ({"mask": masks.padding(LENGTHS)}, {"allowed": WITHIN}),
    "mask per head": ({"mask": HEAD_MASK}, {"allowed": HEAD_MASK}),
    "mask per example": ({"mask": EXAMPLE_MASK}, {"allowed": EXAMPLE_MASK[:, None]}),
    "0/1 mask": ({"mask": HEAD_MASK.astype(int)}, {"allowed": HEAD_MASK}),
    "composed": (
        {"mask": masks.causal() & masks.padding(LENGTHS) | ~masks.dense(HEAD_MASK)},
        {"allowed": (CAUSAL & WITHIN) | ~HEAD_MASK},
    ),
    "bias per head": ({"bias": BIAS}, {"bias": BIAS}),
    "bias per example": ({"bias": BIAS[:, 0]}, {"bias": BIAS[:, :1]}),
    "alibi and mask": (
        {"bias": positions.alibi(H), "mask": masks.padding(LENGTHS)},
        {
            "bias": -(2.0 ** -np.arange(2, 10, 2))[:, None, None] * DISTANCE,
            "allowed": WITHIN,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_oracle(name, arrays, check):
    check(arrays((B,), T, S, H, G, K, V), *CASES[name])


@pytest.mark.parametrize("num_key_heads", [H, 1])
def test_keys_may_have_as_many_heads_as_queries_or_one(num_key_heads, arrays, check):
    check(arrays((B,), T, S, H, num_key_heads, K, V), *CASES["composed"])


TILES = Blockwise(rows=2, columns=4, heads=3)
each_way = pytest.mark.parametrize(
    "implementation", ["dense", TILES], ids=["dense", "blockwise"]
)


@each_way
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64])
def test_attention_in_other_dtypes_equals_the_oracle(
    dtype, implementation, arrays, check
):
    options, stated = CASES["composed"]
    options = options | {"implementation": implementation}
    with jax.enable_x64(dtype == jnp.float64):
        inputs = arrays((B,), T, S, H, G, K, V, dtype=dtype)
        check(inputs, options, stated, dtype=dtype)


@pytest.mark.parametrize("name", ["nothing", "composed", "alibi and mask"])
def test_attention_equals_the_oracle_without_jit(name, arrays, check):
    inputs = arrays((B,), T, S, H, G, K, V)
    check(inputs, *CASES[name], compiled=lambda function: function)


def test_attention_written_by_hand():
    query = jnp.asarray([[[1.0, 0.0]], [[0.0, 2.0]]])  # [T, H, K] = [2, 1, 2]
    key = jnp.asarray([[[math.log(3), 0.0]], [[0.0, math.log(2)]]])
    value = jnp.asarray([[[4.0, 0.0, 1.0]], [[0.0, 8.0, 1.0]]])
    values, attention_map = attend(query, key, value, score=dot_product_score(scale=1))
    # Scores [[log 3, 0], [0, 2 log 2]]: weights [[3/4, 1/4], [1/5, 4/5]].
    weights = [[[0.75, 0.25], [0.2, 0.8]]]
    np.testing.assert_allclose(attention_map.weights(), weights, rtol=1e-6)
    expected = [[[3.0, 2.0, 1.0]], [[0.8, 6.4, 1.0]]]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    logsumexp = [[math.log(4), math.log(5)]]
    np.testing.assert_allclose(attention_map.logsumexp, logsumexp, rtol=1e-6)


@each_way
@pytest.mark.parametrize("batch", [(), (1,), (3, 2)])
def test_any_leading_axes_may_stand_in_front(batch, implementation, arrays, check):
    inputs = arrays(batch, T, S, H, G, K, V)
    lengths = np.random.default_rng(0).integers(0, S + 1, batch)
    within = (np.arange(S) < lengths[..., None])[..., None, None, :]
    options = {"mask": masks.padding(lengths), "implementation": implementation}
    check(inputs, options, {"allowed": within})


@each_way
@pytest.mark.parametrize(
    "sizes",
    [{"batch": (2, 0)}, {"batch": (0,), "G": 2}, {"T": 0}, {"S": 0, "G": 2}, {"V": 0}],
)
def test_axes_may_be_empty(sizes, implementation, arrays, check):
    inputs = arrays(**sizes)
    lengths = np.zeros(inputs[0].shape[:-3], int)
    mask = masks.causal() & masks.padding(lengths)
    options = {"mask": mask, "implementation": implementation}
    check(inputs, options, {"allowed": False})
    loss = lambda *inputs: attend(*inputs, **options)[0].sum()  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    statistics = jax.jit(lambda *x: attend(*x, mask=mask)[1].statistics())(*inputs)
    assert statistics.entropy.shape == (*inputs[0].shape[:-3], inputs[0].shape[-2])
    assert not statistics.entropy.any()


def test_bias_of_minus_infinity_masks(arrays, check):
    allowed = HEAD_MASK.copy()
    allowed[0, 1] = False
    bias = np.where(allowed, 0.0, -np.inf).astype(np.float32)
    check(arrays((B,), T, S), {"bias": bias}, {"allowed": allowed})


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


QUERY, KEY, VALUE = ones(B, T, H, K), ones(B, S, G, K), ones(B, S, G, V)
FITTING = {"query": QUERY, "key": KEY, "value": VALUE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": ones(T, K)}, r"must be \[B..., T, H, K\].*got query \(3, 6\)"),
        ({"key": ones(S, G, K)}, r"must be \[B..., T, H, K\].*key \(5, 2, 6\)"),
        ({"value": ones(3, S, G, V)}, r"disagree on batch axes: .*value \(3, 5"),
        ({"key": ones(B, S, G, 5)}, r"disagree on the size K per head: .*\(2, 5, 2, 5"),
        ({"value": ones(B, 4, G, V)}, r"disagree on positions S or heads G"),
        ({"value": ones(B, S, 4, V)}, r"disagree on positions S or heads G"),
        (
            {"key": ones(B, S, 3, K), "value": ones(B, S, 3, V)},
            r"G must divide the query heads H: query \(2, 3, 4, 6\), key \(2, 5, 3",
        ),
        (
            {"key": ones(B, S, 0, K), "value": ones(B, S, 0, V)},
            r"G must divide the query heads H",
        ),
        (
            {"query": ones(B, T, H, 0), "key": ones(B, S, G, 0)},
            "K per head must be at least 1",
        ),
        ({"query": ones(B, T, H, K, dtype=int)}, "query must be of floats, got int32"),
        ({"value": ones(B, S, G, V, dtype=bool)}, "value must be of floats, got bool"),
        ({"mask": np.ones([B, T, S], np.float32)}, r"got float32; .* as bias="),
        ({"mask": np.ones([B, S], bool)}, r"\(2, 3, 5\) here.*got shape \(2, 5\)"),
        ({"mask": np.ones([B, H, S, T], bool)}, r"\(2, 4, 3, 5\) here.*\(2, 4, 5, 3\)"),
        ({"mask": masks.padding(np.asarray([1, 2, 3]))}, r"lengths must be \[B...\]"),
        ({"mask": masks.padding(np.asarray([1, 6]))}, r"in 0..S = 0..5, got 6"),
        ({"bias": np.ones([B, T, S], bool)}, r"bias must be floating point, got bool"),
        ({"bias": ones(T, S)}, r"bias must be .*\(2, 3, 5\) here.*got shape \(3, 5\)"),
        ({"bias": positions.alibi(3)}, "has 3 heads, but attention has 4"),
        ({"score": Rated(ones(3))}, r"rate must be \[H\].*got shape"),
        (
            {"implementation": "dens"},
            "one of auto, dense.*got 'dens'. Did you mean 'dense'",
        ),
        (
            {"score": "dot"},
            "score must be None, a function .*a Score, as dot_product.. .*got 'dot'",
        ),
        ({"normalizer": "softmax"}, "as sink, unnormalized return; got 'soft"),
        ({"normalizer": sink}, "as sink, unnormalized return; got <func"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a number in \[0, 1\), got 1.0"),
        ({"dropout_rate": -0.1}, r"dropout_rate must be a number in \[0, 1\)"),
        ({"dropout_rate": 0.1}, r"dropout_rate is 0.1, which needs a key in rng="),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    arguments = FITTING | changes
    inputs = [arguments.pop(name) for name in ("query", "key", "value")]
    with pytest.raises((TypeError, ValueError), match=message):
        attend(*inputs, **arguments)
