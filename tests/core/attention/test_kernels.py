"""The kernels of accelerators, as far as a machine without any can tell.

What cuDNN is asked for is computed by XLA instead; the TPU kernel is interpreted. Both
are lowered for their platform.

B batch, T queries, S keys, H query heads, G key heads, K size.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mha_haiku import masks
from mha_haiku.core.attention import attend, kernels, scores
from tests import everyday, oracles
from tests.core.attention.xla_kernel import XLA

B, H, G, K = 2, 4, 2, 8
CUDNN, TPU = kernels.CuDNN(), kernels.FlashTPU()
LENGTHS, QUERY_LENGTHS = np.asarray([4, 2]), np.asarray([1, 3])
PADDING = masks.padding(LENGTHS, QUERY_LENGTHS)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(1, 0),
    "causal window": masks.window(2, None) & masks.causal(),
    "padding": PADDING,
    "both": masks.causal() & masks.padding(LENGTHS),
    "no keys": masks.causal() & masks.padding(np.asarray([0, 3])),
    "no queries": masks.padding(LENGTHS, np.asarray([0, 3])),
}


def by(kernel):
    """Returns the implementation of attention by a kernel."""
    return functools.partial(kernels.attend, kernel=kernel)


def gradients_by(implementation, arrays, mask, score=None, of_map=False):
    """Returns the gradients of some values, and of the logsumexp, and the values."""

    def loss(*arrays):
        values, found = attend(
            *arrays, mask=mask, score=score, implementation=implementation
        )
        factors = np.random.default_rng(0).normal(size=values.shape)
        total = (values * factors).sum()
        if of_map:
            found = found.logsumexp
            total += jnp.where(found == -jnp.inf, 0, found**2).sum()
        return total, values

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", everyday.some(MASKS, 2))
def test_what_cudnn_is_asked_for_is_attention(name, check, arrays):
    mask, (T, S) = MASKS[name], (3, 5)
    inputs = arrays((B,), T, S, H, G, K, K)
    implementation = by(XLA())
    allowed = np.broadcast_to(mask.array(T, S), [B, T, S])[:, None]
    options = {"mask": mask, "implementation": implementation}
    check(inputs, options, {"allowed": allowed})
    of_map = name == "no keys"
    found = gradients_by(implementation, inputs, mask, of_map=of_map)
    wanted = gradients_by("dense", inputs, mask, of_map=of_map)
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, 1e-5, 1e-5), found, wanted)


@pytest.mark.parametrize("batch, lengths", [((), 4), ((2, 3), [[4], [2]])])
def test_batch_axes_and_the_scale_are_those_of_the_call(batch, lengths, check, arrays):
    scale, lengths = 0.7, np.asarray(lengths)
    check(
        arrays(batch, 3, 5, H, G, K, K),
        {
            "mask": masks.padding(lengths),
            "score": scores.dot_product(scale),
            "implementation": by(XLA()),
        },
        {
            "allowed": (np.arange(5) < lengths[..., None])[..., None, None, :],
            "score": functools.partial(oracles.dot_product, scale=scale),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, mask",
    [
        ((128, 256), masks.causal() & masks.padding([100, 30], [50, 128])),
        ((128, 128), masks.full()),
        ((128, 128), masks.causal()),
        ((256, 128), masks.causal()),
        ((128, 256), masks.padding([100, 0])),
        ((1024, 1024), masks.causal()),
    ],
)
def test_tpu_kernel_interpreted_gives_what_dense_gives(sizes, mask, arrays):
    inputs = arrays((B,), *sizes, 2, 1, K, K)
    score = scores.dot_product(0.4)
    with pltpu.force_tpu_interpret_mode():
        found = gradients_by(by(TPU), inputs, mask, score)
    wanted = gradients_by("dense", inputs, mask, score)
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, 2e-5, 2e-5), found, wanted)


def lowered(kernel, platform, mask, dtype, sizes, with_gradient, with_map=False):
    """Returns the program of values by a kernel for a platform, as text."""

    def run(query, key, value):
        options = {"mask": mask, "implementation": by(kernel)}
        values, found = attend(query, key, value, **options)
        total = values.astype(jnp.float32).sum()
        return total, found.logsumexp if with_map else None

    T, S, size = sizes
    shapes = (B, T, H, size), (B, S, G, size), (B, S, G, size)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    run = jax.grad(run, (0, 1, 2), has_aux=True) if with_gradient else run
    return jax.jit(run).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", everyday.those([64, 80, 256], 80))
def test_tpu_kernel_is_lowered_alone(size, dtype, with_gradient):
    mask = masks.causal() & masks.padding(np.asarray([100, 30]))
    program = lowered(TPU, "tpu", mask, dtype, (1024, 512, size), with_gradient)
    assert program.count("tpu_custom_call") == (3 if with_gradient else 1)
    assert "stablehlo.while" not in program  # of the pass for an unused map


@pytest.mark.parametrize(
    "mask, kind, window",
    [
        # Not NO_MASK, whose gradients may be NaN.
        (masks.full(), "PADDING", 0),
        (masks.causal(), "CAUSAL", 0),
        (masks.window(5, 0), "CAUSAL", 6),
        (masks.padding(LENGTHS), "PADDING", 0),
        (masks.causal() & PADDING, "PADDING_CAUSAL", 0),
    ],
)
def test_cudnn_is_lowered_alone_with_the_mask(mask, kind, window, monkeypatch):
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    if not hasattr(module, "check_cudnn_version"):
        pytest.skip("this version of JAX looks for cuDNN in another way")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    # The map is read, and no second pass computes its logsumexp.
    program = lowered(CUDNN, "cuda", mask, jnp.bfloat16, (128, 256, 64), True, True)
    (results,) = re.findall(r"func.func public @main.*-> \((.*)\) \{", program)
    assert f"tensor<{B}x{H}x128xf32>" in results
    configs = re.findall(r'backend_config = "(\{.*?\})"', program.replace(r"\22", "'"))
    configs = [json.loads(x.replace("'", '"')) for x in configs]
    configs = [x["cudnn_fmha_backend_config"] for x in configs]
    assert len(configs) == 2  # forward and backward
    for config in configs:
        assert config["mask_type"] == kind
        assert config["sliding_window_length"] == window
        assert config["fmha_scale"] == 1 / 8
    assert "stablehlo.while" not in program
