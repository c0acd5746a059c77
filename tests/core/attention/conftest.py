"""Arrays to try attention on, and a check of `attend` against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention
from tests import oracles


def random_arrays(
    batch=(2,), T=3, S=5, H=4, G=4, K=6, V=7, dtype=jnp.float32, seed=0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a normal query, key and value."""
    rng = np.random.default_rng(seed)
    shapes = (*batch, T, H, K), (*batch, S, G, K), (*batch, S, G, V)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


TOLERANCES = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}


def check_attention(
    inputs, options=None, stated=None, *, dtype=jnp.float32, compiled=jax.jit
):
    """Asserts that `attend` gives the values, logsumexp and weights of the oracle.

    Args:
      inputs: Query, key and value.
      options: Keyword arguments of `attend`.
      stated: The same for `oracles.attention`.
      dtype: The dtype of the values.
      compiled: What compiles the function; by default `jax.jit`, as a shape compiles
        faster as a whole than operation by operation.
    """

    @compiled
    def found(query, key, value):
        values, attention_map = attention.attend(query, key, value, **options or {})
        return values, attention_map, attention_map.weights()

    values, attention_map, weights = found(*inputs)
    reference = oracles.attention(*inputs, **stated or {})
    softmax_dtype = jnp.promote_types(dtype, jnp.float32)
    assert values.dtype == dtype
    assert attention_map.dtype == weights.dtype == softmax_dtype
    assert attention_map.shape == weights.shape == reference.weights.shape
    tolerance, exact = (TOLERANCES[jnp.dtype(d).name] for d in (dtype, softmax_dtype))
    values = np.asarray(values, np.float64)
    np.testing.assert_allclose(values, reference.values, tolerance, 2 * tolerance)
    logsumexp = attention_map.logsumexp
    np.testing.assert_allclose(logsumexp, reference.logsumexp, 2 * exact, 4 * exact)
    np.testing.assert_allclose(weights, reference.weights, 5 * exact, exact)


@pytest.fixture(scope="session")
def arrays():
    """Returns the maker of queries, keys and values."""
    return random_arrays


@pytest.fixture(scope="session")
def check():
    """Returns `check_attention`."""
    return check_attention


def _as_it_is(function, **unused):
    del unused
    return function


@pytest.fixture(
    params=[
        pytest.param(_as_it_is, id="eager", marks=pytest.mark.slow),
        pytest.param(jax.jit, id="jit"),
    ]
)
def compiled(request):
    """Returns what compiles a function, or leaves it: a property holds either way."""
    return request.param
