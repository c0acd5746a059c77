"""Properties that a bare kernel would break: queries without keys, NaN, padding.

B batch, T queries, S keys, H query heads, G key heads, K size.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mha_haiku import masks
from mha_haiku.core.attention import attend, kernels
from tests import everyday, oracles
from tests.core.attention.xla_kernel import XLA

B, T, S, H, G, K = 2, 5, 6, 4, 2, 8
FUSED = functools.partial(kernels.attend, kernel=XLA())
LENGTHS = np.asarray([4, 0])
MASKS = {
    "causal": masks.causal(),
    "window": masks.window(1, 0),
    "padding": masks.padding(LENGTHS, np.asarray([3, 5])),
    "both": masks.causal() & masks.padding(np.asarray([4, 6]), np.asarray([3, 5])),
    "no mask": masks.full(),
}


@functools.partial(jax.jit, static_argnums=0)
def results(implementation, arrays, mask):
    """Returns values and logsumexp, and gradients of the sum of the values."""

    def values_and_logsumexp(*arrays):
        values, found = attend(*arrays, mask=mask, implementation=implementation)
        return values, found.logsumexp

    values, pullback, logsumexp = jax.vjp(values_and_logsumexp, *arrays, has_aux=True)
    return (values, logsumexp), pullback(jnp.ones_like(values))


@pytest.mark.parametrize("name", [name for name in MASKS if name != "no mask"])
def test_nan_and_inf_reach_just_the_queries_that_see_them(name, arrays):
    query, key, value = arrays((B,), T, S, H, G, K, K)
    faulty = (
        query.at[0, 1, 2, 0].set(jnp.nan).at[1, 4, 0, 3].set(jnp.inf),
        key.at[0, 3, 0, 1].set(jnp.inf).at[1, 5, 1].set(jnp.nan),
        value.at[0, 0, 1, 2].set(jnp.nan).at[1, 2, 0, 0].set(-jnp.inf),
    )
    found = results(FUSED, faulty, MASKS[name])
    wanted = results("dense", faulty, MASKS[name])
    is_nan = np.isnan(found[0][0]).all(-1)
    assert is_nan.any() and not is_nan.all()
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, 1e-5, 1e-5), found, wanted)
    assert all(np.isfinite(x).all() for x in found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_query_that_sees_nothing_gets_zeros_and_has_no_gradient(name, arrays):
    mask = MASKS[name] & masks.padding(LENGTHS, np.asarray([2, T]))
    inputs = arrays((B,), T, S, H, G, K, K)
    (values, logsumexp), found = results(FUSED, inputs, mask)
    _, blind = oracles.unseen_and_masked(mask, T, S)  # [B, T]
    assert blind[1].all() and blind[0, 2:].all() and not blind[0, 0]
    assert not values[blind].any()
    assert (logsumexp.swapaxes(1, 2)[blind] == -np.inf).all()
    assert not found[0][blind].any()
    assert not any(x[1].any() for x in found)
    assert found[0][0, 1].all()


@pytest.mark.parametrize("filling", [-1e30, 3e38, np.nan])
@pytest.mark.parametrize(
    "kernel, sizes",
    everyday.some([(XLA(), (T, S)), (kernels.FlashTPU(), (128, 128))], 1),
)
def test_content_of_padding_is_not_felt_bit_for_bit(kernel, sizes, filling, arrays):
    query, key, value = arrays((B,), *sizes, 2, 1, K, K)
    mask = masks.padding(LENGTHS, np.asarray([3, 4]))
    keys = (np.arange(sizes[1]) >= LENGTHS[:, None])[..., None, None]
    queries = (np.arange(sizes[0]) >= np.asarray([3, 4])[:, None])[..., None, None]
    filled = [
        np.where(beyond, np.float32(filling), x)
        for beyond, x in ((queries, query), (keys, key), (keys, value))
    ]

    implementation = functools.partial(kernels.attend, kernel=kernel)
    with pltpu.force_tpu_interpret_mode():
        expected = results(implementation, (query, key, value), mask)
        found = results(implementation, filled, mask)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Recorder(kernels.CuDNN):
    """A kernel that tells what it was called with."""

    calls: ClassVar[list] = []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return arguments[0], None


@pytest.mark.slow
def test_no_kernel_is_given_a_length_of_zero(arrays):
    kernel = Recorder()
    mask = masks.padding(LENGTHS, np.asarray([0, 3])) & masks.causal()
    implementation = functools.partial(kernels.attend, kernel=kernel)
    values, _ = attend(
        *arrays((B,), T, S, H, G, K, K), mask=mask, implementation=implementation
    )
    *_, found, scale = kernel.calls.pop()
    np.testing.assert_array_equal(found.key_lengths[0], [4, 1])
    np.testing.assert_array_equal(found.query_lengths[0], [1, 3])
    assert scale == 1 / np.sqrt(K)
    assert not values.any()


@pytest.mark.parametrize("with_gradient", [False, True])
def test_map_that_nobody_reads_is_not_computed(with_gradient, arrays):
    inputs = arrays((B,), 64, 64, H, G, K, K)

    def values(*arrays):
        mask = masks.causal() & masks.padding(np.asarray([40, 30]))
        return attend(*arrays, mask=mask, implementation=FUSED)[0].sum()

    run = jax.grad(values, (0, 1, 2)) if with_gradient else values
    program = jax.jit(run).lower(*inputs).as_text()
    assert "stablehlo.dot_general" in program
    assert "stablehlo.while" not in program  # of the blockwise pass


def test_logsumexp_of_bfloat16_is_not_rounded(arrays):
    query, key, value = arrays((B,), T, S, H, G, K, K, dtype=jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def weights(implementation):
        found = attend(query, key, value, implementation=implementation)[1]
        return found.logsumexp, found.weights()

    found, wanted = weights(FUSED), weights("dense")
    assert found[0].dtype == jnp.float32
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, 1e-5), found, wanted)


@pytest.mark.parametrize("name", MASKS)
def test_kernel_of_this_machine_gives_what_dense_gives(name, arrays):
    platform = kernels.platform_name()
    inputs = arrays((B,), 256, 256, H, G, 64, 64, dtype=jnp.bfloat16)
    mask = masks.window(20, 0) if name == "window" else MASKS[name]
    if name in ("padding", "both"):
        mask = masks.padding(np.asarray([200, 0]), np.asarray([100, 256]))
        mask = mask & masks.causal() if name == "both" else mask
    if platform not in ("cuda", "tpu"):
        pytest.skip(
            f"{platform} has no kernel; run with JAX_PLATFORMS=cuda,cpu or tpu,cpu"
        )
    if platform == "tpu" and name == "window":
        pytest.skip("the TPU kernel knows no windows")
    found = results(kernels.attend, inputs, mask)
    wanted = results("dense", inputs, mask)
    for outputs, expected in zip(found, wanted, strict=True):
        for x, y in zip(outputs, expected, strict=True):
            x, y = (np.asarray(array, np.float32) for array in (x, y))
            np.testing.assert_allclose(x, y, 5e-2, 5e-2)
