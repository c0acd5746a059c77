"""Attention in functions of others is found, shown and changed; nothing else is."""

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
    """Returns the output of a case, and what is found in it by facet."""
    case = CASES[name]()
    output, found = jax.jit(sites.look(case.function, ["*"]))(*case.arguments)
    assert set(found) == {f"{case.name}/{facet}" for facet in FACETS}
    return output, {facet: found[f"{case.name}/{facet}"] for facet in FACETS}


@functools.cache
def _changed(name):
    """Returns what edits of a case give, and the same by hand, in one program."""
    case = CASES[name]()
    gates = jnp.asarray(GATES[: case.num_heads])

    def edited(**edits):
        edits = {f"*/{facet}": edit for facet, edit in edits.items()}
        return sites.edit(case.function, edits)

    def gated(gates, params, x, y):
        gates = gates.reshape(1, 1, -1, 1)
        return edited(heads=lambda heads: heads * gates)(params, x, y)

    def gated_by_hand(gates, params, x, y):
        return case.function(case.gated(params, gates), x, y)

    def with_gradient(function, arguments):
        def total(gates):
            output = function(gates, *arguments)
            return (output @ jnp.cos(jnp.arange(D, dtype=output.dtype))).sum(), output

        (_, output), gradient = jax.value_and_grad(total, has_aux=True)(gates)
        return output, gradient

    @jax.jit
    def run(params, x, y):
        arguments = params, x, y
        unasked = case.unasked(params), x, y
        without_queries, found = sites.look(case.function, ["*/weights"])(*unasked)
        (weights,) = found.values()
        reweighted = edited(weights=lambda _: weights)
        return {
            "gated": with_gradient(gated, arguments),
            "gated by hand": with_gradient(gated_by_hand, arguments),
            "without head 0": gated(gates.at[0].set(0), *arguments),
            "weights without queries": weights,
            "without queries": without_queries,
            "reweighted": sites.look(reweighted, ["*"])(*arguments),
            "queries edited": edited(query=jnp.zeros_like)(*arguments),
            "values doubled": edited(value=lambda x: 2 * x)(*arguments),
            "heads doubled": edited(heads=lambda x: 2 * x)(*arguments),
        }

    return run(*case.arguments)


@every_case
def test_output_is_that_of_the_function_to_the_bit(name):
    case, (output, _) = CASES[name](), _found(name)
    np.testing.assert_array_equal(output, jax.jit(case.function)(*case.arguments))


@every_case
def test_all_of_an_attention_is_shown_in_canonical_axes(name):
    case, (_, found) = CASES[name](), _found(name)
    key_size, value_size = (found[x].shape[-1] for x in ("query", "value"))
    chex.assert_shape(found["query"], (B, T, case.num_heads, key_size))
    chex.assert_shape(found["key"], (B, S, case.num_key_heads, key_size))
    chex.assert_shape(found["value"], (B, S, case.num_key_heads, value_size))
    chex.assert_shape(found["weights"], (B, case.num_heads, T, S))
    chex.assert_shape(found["heads"], (B, T, case.num_heads, value_size))
    for operand in ("query", "key", "value"):  # the map has them, too
        chex.assert_trees_all_equal(getattr(found["map"], operand), found[operand])


@every_case
def test_weights_and_map_are_those_of_the_reference(name):
    case, (_, found) = CASES[name](), _found(name)
    weights, map_ = found["weights"], found["map"]
    expected = case.expected(*case.arguments)
    np.testing.assert_allclose(weights, expected, atol=case.tolerance)
    sums = weights.sum(-1)
    is_one, is_masked = np.isclose(sums, 1, atol=1e-5), weights.max(-1) == 0
    assert is_one.all() == case.sums_to_one
    assert (map_.rows_sum_to == "1") == (is_one | is_masked).all()
    if (expected >= 0).all():  # talking heads may have others, of which there is no map
        np.testing.assert_allclose(map_.weights(), weights, atol=case.tolerance)


@every_case
def test_heads_are_weights_times_values(name):
    case, (_, found) = CASES[name](), _found(name)
    if "dropout" in name:
        return  # weights are those before dropout
    weights, value = (np.asarray(found[x], np.float64) for x in ("weights", "value"))
    value = np.repeat(value, case.num_heads // case.num_key_heads, axis=2)
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    np.testing.assert_allclose(found["heads"], expected, atol=10 * case.tolerance)


@every_case
def test_gated_heads_are_gated_rows_of_the_output_projection(name):
    changed, tolerance = _changed(name), 10 * CASES[name]().tolerance
    chex.assert_trees_all_close(
        changed["gated"], changed["gated by hand"], rtol=1e-4, atol=10 * tolerance
    )
    output, gradient = changed["gated"]
    assert np.abs(output - changed["without head 0"]).max() > 1e-2
    assert np.abs(gradient).min() > 0


@every_case
def test_weights_of_equal_scores_give_what_queries_of_zeros_do(name):
    changed, tolerance = _changed(name), 10 * CASES[name]().tolerance
    output, found = changed["reweighted"]
    expected = changed["without queries"]
    np.testing.assert_allclose(output, expected, atol=tolerance)
    np.testing.assert_allclose(changed["queries edited"], expected, atol=tolerance)
    # What looks at an edited function sees what the edit left, and all of it once.
    assert {x.rpartition("/")[2] for x in found} == set(FACETS)
    assert len(found) == len(FACETS)
    found = {name.rpartition("/")[2]: value for name, value in found.items()}
    weights = changed["weights without queries"]
    np.testing.assert_array_equal(found["weights"], weights)
    if (weights >= 0).all():
        np.testing.assert_allclose(found["map"].weights(), weights, rtol=1e-5)


@every_case
def test_doubled_values_double_heads(name):
    changed, tolerance = _changed(name), 10 * CASES[name]().tolerance
    np.testing.assert_allclose(
        changed["values doubled"], changed["heads doubled"], rtol=1e-4, atol=tolerance
    )


@every_case
def test_gradients_have_no_attention_of_their_own(name):
    case = CASES[name]()

    def loss(*arguments):
        return case.function(*arguments).sum()

    names = sites.sites(jax.grad(loss, argnums=(0, 1, 2)), *case.arguments)
    names = {name.removeprefix("rematted_computation/") for name in names}
    assert names == {f"{case.name}/{facet}" for facet in FACETS}


@pytest.mark.parametrize("name", foreign.OTHERS)
def test_other_softmaxes_are_no_attention(name):
    function, *arguments = foreign.OTHERS[name]
    assert not sites.sites(function, *arguments)
    assert not sites.sites(jax.grad(lambda *x: function(*x).sum(), 1), *arguments)
