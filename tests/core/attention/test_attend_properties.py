"""Properties of attention: gradients, invariances, dropout.

B batch, T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import devices, masks, positions
from mha_haiku.core.attention import Blockwise, Sharded, attend, sigmoid
from mha_haiku.core.attention import dot_product as dot_product_score
from tests import everyday

B, T, S, H, G, K, V = 2, 3, 5, 4, 2, 6, 7
LENGTHS = np.asarray([4, 2])


def test_gradient_reaches_just_the_keys_that_a_query_may_attend_to(arrays):
    query, key, value = arrays((), T, S, H, H, K, V)
    mask = np.random.default_rng(0).random([H, T, S]) < 0.5

    def values_of(value):
        return attend(query, key, value, mask=mask)[0].sum(-1)

    reaches = jax.jit(jax.jacobian(values_of))(value).any(-1)  # [T, H, S, H]
    expected = np.einsum("hts,hg->thsg", mask, np.eye(H)).astype(bool)
    np.testing.assert_array_equal(reaches, expected)


def _ring():
    mesh = devices.make_mesh(jax.local_devices()[:2], data=1, heads=1, sequence=2)
    return Sharded(mesh, Blockwise(rows=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "score"),
    [
        (lambda: "formula", None),
        (lambda: "dense", dot_product_score(soft_cap=1.5)),
        (lambda: "dense", sigmoid()),
        (lambda: Blockwise(rows=2, columns=4), None),
        pytest.param(_ring, None, marks=pytest.mark.slow),
    ],
    ids=["formula", "dense, soft cap", "dense, sigmoid", "blockwise", "ring"],
)
def test_content_of_padding_is_not_felt_bit_for_bit(implementation, score, arrays):
    T, S = 4, 6  # which two devices can share
    query, key, value = arrays((B,), T, S, H, G, K, V)
    query *= 10  # so that products with 3e38 overflow to both sides
    chosen = np.random.default_rng(1).normal(size=[B, T, H, V]).astype(np.float32)
    beyond = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
    implementation = implementation()

    @jax.jit
    def results(key, value):
        def loss(query, key, value):
            values, found = attend(
                *(query, key, value),
                mask=masks.padding(LENGTHS),
                score=score,
                implementation=implementation,
            )
            mixed = found.apply(jnp.repeat(found.value, H // G, axis=-2))
            total = ((values + jnp.sin(mixed)) * chosen).sum()
            return total, (values, found.logsumexp, mixed)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

    expected = results(*(np.where(beyond, 0, x) for x in (key, value)))
    for filling in (-1e30, 3e38, np.nan, np.inf):
        found = results(
            *(np.where(beyond, np.float32(filling), x) for x in (key, value))
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_what_later_queries_alone_see_is_not_felt_bit_for_bit(arrays):
    """Nor where it overflows in their values, which the loss ignores."""
    query, key, value = arrays((B,), S, S, H, G, K, V)
    cut = 3

    @functools.partial(jax.jit, static_argnums=0)
    def results(implementation, *inputs):
        def loss(*inputs):
            values, _ = attend(
                *inputs, mask=masks.causal(), implementation=implementation
            )
            return (values[:, :cut] ** 2).sum(), values[:, :cut]

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*inputs)

    for implementation in ("dense", Blockwise(rows=2, columns=2)):
        expected = results(implementation, query, key, value)
        for filling in (3e38, np.nan, np.inf):
            later_key = key if np.isfinite(filling) else key.at[:, cut:].set(filling)
            later_value = value.at[:, cut:].set(filling)
            found = results(implementation, query, later_key, later_value)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


RNG = np.random.default_rng(0)
PER_POSITION = {
    "relative": (masks.causal(), positions.alibi(H)),
    "buckets": (
        masks.window(2, 1),
        positions.relative_bias(RNG.normal(size=[8, H]), bidirectional=True),
    ),
    "padding": (masks.padding(np.array([S, 3]), np.array([S - 1, S])), None),
    "segments": (masks.segments(np.arange(S)[None] // 2), None),
    "arrays": (RNG.random([B, H, S, S]) < 0.6, RNG.normal(size=[B, S, S])),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "implementation"),
    everyday.some(
        [
            *itertools.product(PER_POSITION, [Blockwise(rows=2, columns=4)]),
            ("buckets", "dense"),
            ("arrays", "dense"),
        ],
        2,
    ),
)
def test_last_queries_alone_give_what_they_give_among_all(arrays, name, implementation):
    """In float64, as a dense product of other rows may add up in another order."""
    inputs = arrays((B,), S, S, H, G, K, V)
    mask, bias = PER_POSITION[name]

    def run(query, bias, first_query):
        def attended(query, bias):
            values, found = attend(
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                first_query=first_query,
                implementation=implementation,
            )
            return (values[:, -2:] ** 2).sum(), (
                values[:, -2:],
                found.tile([-1, -2], range(S)),
                found.pooled(2, 3, queries=slice(-2, None)),
            )

        if bias is None:
            outputs, gradient = jax.value_and_grad(attended, has_aux=True)(query, None)
            return outputs[1], gradient[:, -2:]
        outputs, gradients = jax.value_and_grad(attended, (0, 1), has_aux=True)(
            query, bias
        )
        return outputs[1], gradients[0][:, -2:], gradients[1]

    with jax.enable_x64(True):
        query, key, value, bias = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), (*inputs, bias)
        )
        whole = jax.jit(lambda *inputs: run(*inputs, 0))(query, bias)
        last = jax.jit(lambda *inputs: run(*inputs, S - 2))(query[:, -2:], bias)
        traced = jax.jit(run)(query[:, -2:], bias, S - 2)
    for results in (last, traced):
        jax.tree.map(_assert_same, results, whole)


def _assert_same(result, expected):
    """Asserts float64 arrays that are equal but for the order of additions."""
    assert result.dtype == expected.dtype == np.float64
    atol = 1e-12 * np.abs(expected).max()
    np.testing.assert_allclose(result, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("first_query", [-1, 1.5, [1, 2]])
def test_first_query_is_one_position(arrays, first_query):
    with pytest.raises(ValueError, match="first_query must be an integer of at least"):
        attend(*arrays((B,), 2, S, H, G, K, V), first_query=first_query)


def test_arrays_of_a_mask_reach_to_the_last_query(arrays):
    inputs = arrays((B,), 2, S, H, G, K, V)
    mask = np.ones([B, 2, S], bool)
    with pytest.raises(ValueError, match=rf"which is \({B}, 5, {S}\) here"):
        attend(*inputs, mask=mask, first_query=3)
