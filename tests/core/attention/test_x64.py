"""Attention where integers have 64 bits by default, as under `jax_enable_x64`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import attention, masks
from tests import oracles

B, T, S, H, K = 2, 5, 9, 2, 4


@pytest.mark.slow
@pytest.mark.parametrize("integer", ["int32", "int64"])
@pytest.mark.parametrize(
    "implementation", ["dense", attention.Blockwise(3, 4)], ids=["dense", "tiles"]
)
def test_traced_positions_and_lengths_may_be_of_any_integer(implementation, integer):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, n, H, K)) for n in (T, S, S))
    bias = rng.normal(size=(B, H, T + 2, S))
    lengths, first = np.array([9, 4], integer), np.array(2, integer)

    def run(lengths, first, *arrays):
        def total(query, key, value, bias):
            mask = masks.padding(lengths) & masks.window(3, 1)
            values, found = attention.attend(
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                first_query=first,
                implementation=implementation,
            )
            answers = {
                "weights": found.weights(),
                "pooled": found.pooled(3, 2),
                "top": found.top(3).weights,
                "distance": found.statistics(pooled=(2, 2)).distance,
            }
            used = (answers["pooled"] ** 2).sum() + answers["top"].sum()
            return (values**2).sum() + used + answers["distance"].sum(), answers

        return jax.grad(total, (0, 1, 2, 3), has_aux=True)(*arrays)

    arrays = query, key, value, bias
    with jax.enable_x64(True):
        slopes, found = jax.jit(run)(lengths, first, *arrays)
        assert found["weights"].dtype == jnp.float64
        found = jax.tree.map(np.asarray, (slopes, found))
    narrow = (x.astype(np.float32) for x in arrays)
    wanted = jax.jit(run)(lengths.astype(np.int32), first.astype(np.int32), *narrow)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 2e-5), found, wanted
    )
    rows, columns = 2 + np.arange(T)[:, None], np.arange(S)
    near = (columns >= rows - 3) & (columns <= rows + 1)
    allowed = near & (columns < lengths[:, None, None, None])
    reference = oracles.attention(
        query, key, value, allowed=allowed, bias=bias[:, :, 2:]
    )
    np.testing.assert_allclose(found[1]["weights"], reference.weights, 1e-10, 1e-12)
