"""An unused map costs nothing: compiled operations and memory.

B batch, T positions, H heads, K size per head.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import masks
from mha_haiku.core.attention import Blockwise, attend, dense, scores
from mha_haiku.core.attention.inputs import Inputs, Nonfinite, Weighting

B, T, H, K = 3, 64, 4, 8
ARRAY = jax.ShapeDtypeStruct((B, T, H, K), jnp.float32)
MASKS = {"full": masks.full(), "causal": masks.causal()}


pytestmark = pytest.mark.usefixtures("optimized")


def cost(function, with_gradient):
    """Returns flops and temporary bytes of a compiled function of query, key, value."""
    run = function
    if with_gradient:
        run = jax.grad(lambda *inputs: (function(*inputs) ** 2).sum(), (0, 1, 2))
    compiled = jax.jit(run).lower(ARRAY, ARRAY, ARRAY).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return compiled.cost_analysis()["flops"], temporaries


def values_alone(mask):
    """Returns the dense values, with no map ever made."""

    def run(query, key, value):
        nonfinite = None
        if not isinstance(mask, masks.Full):
            nonfinite = Nonfinite.of(query, key, value)
        weighting = Weighting(mask, score=scores.dot_product())
        inputs = Inputs(query, key, value, weighting, nonfinite)
        return dense.attend(inputs, 0.0)[0]

    return run


def formula(query, key, value):
    """Returns softmax(query key / sqrt(K)) value, written the short way."""
    scores = jnp.einsum("bthk,bshk->bhts", query / np.sqrt(K), key)
    return jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), value)


@pytest.mark.slow
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_map_that_nobody_reads_costs_nothing(name, with_gradient):
    mask = MASKS[name]
    found = cost(lambda *inputs: attend(*inputs, mask=mask)[0], with_gradient)
    assert found == cost(values_alone(mask), with_gradient)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_attention_costs_no_more_than_the_formula(with_gradient):
    flops, temporaries = cost(lambda *inputs: attend(*inputs)[0], with_gradient)
    formula_flops, formula_temporaries = cost(formula, with_gradient)
    assert flops <= 1.02 * formula_flops
    # A copy or two of the queries in another layout; a matrix would be far more.
    assert temporaries <= formula_temporaries + 2 * 4 * ARRAY.size


def test_values_take_the_place_of_queries_that_nobody_reads_later():
    def run(query, key, value):
        blockwise = Blockwise(16, 16, 1)
        return attend(2 * query, key, value, implementation=blockwise)[0]

    _, temporaries = cost(run, False)
    assert temporaries < 4 * ARRAY.size


def test_map_that_is_returned_costs_no_matrix():
    shapes = jax.eval_shape(attend, ARRAY, ARRAY, ARRAY)
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    assert max(sizes) == ARRAY.size
    assert H * T * T > 2 * T * H * K
