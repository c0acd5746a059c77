"""Attention once more, pair by pair in float64 NumPy, and arrays to try it on.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads, K
query/key size and V value size per head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention


class Reference(NamedTuple):
    """What attention should give, float64."""

    values: np.ndarray  # [B..., T, H, V]
    logsumexp: np.ndarray  # [B..., H, T]
    weights: np.ndarray  # [B..., H, T, S]


def dot_product_of(query, key, head, *, scale=None, soft_cap=None):
    """Returns the scaled dot product of two vectors `[K]`, smoothly capped."""
    del head
    scale = 1 / math.sqrt(len(query)) if scale is None else scale
    product = scale * float(query @ key)
    return product if soft_cap is None else soft_cap * math.tanh(product / soft_cap)


def attention_of(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    score: Callable = dot_product_of,
) -> Reference:
    """Returns attention computed one query at a time.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
      allowed: Booleans that broadcast to `[B..., H, T, S]`.
      bias: Floats that broadcast to `[B..., H, T, S]`.
      score: `score(query [K], key [K], head)`.
    """
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    *batch, num_queries, num_heads, _ = query.shape
    num_keys, num_key_heads = key.shape[-3:-1]
    shape = (*batch, num_heads, num_queries, num_keys)
    allowed = np.broadcast_to(True if allowed is None else allowed, shape)
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, float), shape)
    values = np.zeros((*batch, num_queries, num_heads, value.shape[-1]))
    logsumexp, weights = np.full(shape[:-1], -np.inf), np.zeros(shape)
    for *b, h, t in np.ndindex(shape[:-1]):
        b, g = tuple(b), h // (num_heads // num_key_heads)
        seen = np.flatnonzero(allowed[*b, h, t])
        if not len(seen):
            continue
        scores = np.asarray(
            [score(query[*b, t, h], key[*b, s, g], h) + bias[*b, h, t, s] for s in seen]
        )
        masses = np.exp(scores - scores.max())
        logsumexp[*b, h, t] = scores.max() + math.log(masses.sum())
        weights[*b, h, t, seen] = masses / masses.sum()
        values[*b, t, h] = weights[*b, h, t, seen] @ value[*b, seen, g]
    return Reference(values, logsumexp, weights)


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
      stated: The same for `attention_of`.
      dtype: The dtype of the values.
      compiled: What compiles the function; by default `jax.jit`, as a shape compiles
        faster as a whole than operation by operation.
    """

    @compiled
    def found(query, key, value):
        values, attention_map = attention.attend(query, key, value, **options or {})
        return values, attention_map, attention_map.weights()

    values, attention_map, weights = found(*inputs)
    reference = attention_of(*inputs, **stated or {})
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


@pytest.fixture(autouse=True)
def compiled_quickly(quick_compilation):
    """Every test of this folder compiles quickly."""


@pytest.fixture(scope="session")
def oracle():
    """Returns the reference attention."""
    return attention_of


@pytest.fixture(scope="session")
def dot_product():
    """Returns the reference score of two vectors."""
    return dot_product_of


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
    """Returns what compiles a function, or leaves it: a law holds either way."""
    return request.param
