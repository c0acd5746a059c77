"""Attention of other people's functions is found, shown and changed; nothing else is."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.attention import attention_map  # noqa: F401 (makes the maps)
from mha_haiku.core import sites
from tests.core.sites import foreign
from tests.core.sites.foreign import CASES, B, D, H, S, T

FACETS = ("query", "key", "weights", "value", "map", "heads")
GATES = np.linspace(-0.5, 1.5, H).astype(np.float32)

every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def _found(name):
    case = CASES[name]()
    return jax.jit(sites.look(case.function, ["*"]))(*case.arguments)


def _edited(name, **edits):
    case = CASES[name]()
    edits = {f"*/{facet}": edit for facet, edit in edits.items()}
    return sites.edit(case.function, edits)


def _gated(gates):
    return lambda heads: heads * jnp.reshape(gates, (1, 1, -1, 1))


@every_case
def test_output_is_that_of_the_function_to_the_bit(name):
    case, (output, _) = CASES[name](), _found(name)
    np.testing.assert_array_equal(output, jax.jit(case.function)(*case.arguments))


@every_case
def test_all_of_an_attention_is_shown_in_canonical_axes(name):
    case, (_, found) = CASES[name](), _found(name)
    assert set(found) == {f"{case.name}/{facet}" for facet in FACETS}
    query, key, weights, value, map_, heads = (
        found[f"{case.name}/{facet}"] for facet in FACETS
    )
    chex.assert_shape(query, (B, T, case.num_heads, None))
    chex.assert_shape(key, (B, S, case.num_key_heads, query.shape[-1]))
    chex.assert_shape([weights, map_], (B, case.num_heads, T, S))
    chex.assert_shape(value, (B, S, case.num_key_heads, None))
    chex.assert_shape(heads, (B, T, case.num_heads, value.shape[-1]))
    # The map has them, too.
    chex.assert_trees_all_equal(map_.query, query)
    chex.assert_trees_all_equal(map_.key, key)
    chex.assert_trees_all_equal(map_.value, value)


@every_case
def test_weights_and_map_are_those_of_the_reference(name):
    case, (_, found) = CASES[name](), _found(name)
    expected = case.expected(*case.arguments)
    weights, map_ = found[f"{case.name}/weights"], found[f"{case.name}/map"]
    np.testing.assert_allclose(weights, expected, atol=case.tolerance)
    if (expected >= 0).all():  # a map is of such weights
        np.testing.assert_allclose(map_.weights(), weights, atol=case.tolerance)
    if case.sums_to_one:
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (map_.rows_sum_to == "1") == case.sums_to_one


@every_case
def test_heads_are_weights_times_values(name):
    if "dropout" in name:
        pytest.skip("weights are those before dropout")
    case, (_, found) = CASES[name](), _found(name)
    weights, value, heads = (
        np.asarray(found[f"{case.name}/{facet}"], np.float64)
        for facet in ("weights", "value", "heads")
    )
    value = np.repeat(value, case.num_heads // case.num_key_heads, axis=2)
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    np.testing.assert_allclose(heads, expected, atol=10 * case.tolerance)


@every_case
def test_gated_heads_are_gated_rows_of_the_output_projection(name):
    case = CASES[name]()
    gates = GATES[: case.num_heads]

    def by_edit(gates):
        return _edited(name, heads=_gated(gates))(*case.arguments)

    def by_hand(gates):
        return case.function(case.gated(case.params, gates), *case.inputs)

    def both(function):
        direction = jnp.cos(jnp.arange(B * T * D, dtype=jnp.float32))
        run = lambda gates: (  # noqa: E731
            (function(gates).ravel() @ direction, function(gates))
        )
        (_, output), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(gates)
        return output, gradient

    tolerance = 10 * case.tolerance
    chex.assert_trees_all_close(both(by_edit), both(by_hand), rtol=1e-4, atol=tolerance)
    without = gates * (np.arange(case.num_heads) != 0)
    assert np.abs(by_edit(without) - by_edit(gates)).max() > 1e-3


@every_case
def test_weights_of_equal_scores_are_those_without_queries(name):
    case = CASES[name]()
    unasked = case.unasked(case.params), *case.inputs
    looked = sites.look(case.function, ["*/weights"])
    expected, found = jax.jit(looked)(*unasked)
    (weights,) = found.values()
    run = jax.jit(_edited(name, weights=lambda _: weights))
    output = run(*case.arguments)
    np.testing.assert_allclose(output, expected, atol=10 * case.tolerance)
    # The map sees what an edit left.
    edited = _edited(name, weights=lambda _: weights)
    _, found = sites.look(edited, ["*/map", "*/weights"])(*case.arguments)
    assert set(found) == {f"{case.name}/map", f"{case.name}/weights"}
    np.testing.assert_array_equal(found[f"{case.name}/weights"], weights)


@every_case
def test_operands_are_edited_where_they_enter_a_product(name):
    case = CASES[name]()
    unasked = case.unasked(case.params), *case.inputs
    output = jax.jit(_edited(name, query=jnp.zeros_like))(*case.arguments)
    expected = jax.jit(case.function)(*unasked)
    np.testing.assert_allclose(output, expected, atol=10 * case.tolerance)
    output = jax.jit(_edited(name, value=lambda x: 2 * x))(*case.arguments)
    heads = jax.jit(_edited(name, heads=lambda x: 2 * x))(*case.arguments)
    np.testing.assert_allclose(output, heads, rtol=1e-4, atol=10 * case.tolerance)


@every_case
def test_gradients_have_no_attention_of_their_own(name):
    case = CASES[name]()

    def loss(*arguments):
        return case.function(*arguments).sum()

    names = sites.sites(jax.grad(loss, argnums=(1, 2)), *case.arguments)
    assert {x for x in names if not x.endswith(("query", "key", "value"))} == {
        f"{case.name}/{facet}" for facet in ("weights", "map", "heads")
    }


@pytest.mark.parametrize("name", foreign.OTHERS)
def test_other_softmaxes_are_no_attention(name):
    function, *arguments = foreign.OTHERS[name]
    assert not sites.sites(function, *arguments)
    assert not sites.sites(jax.grad(lambda *x: function(*x).sum(), 1), *arguments)
