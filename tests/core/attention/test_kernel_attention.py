"""Refusals of the kernels of accelerators.

T queries, S keys, H query heads, G key heads, K query/key and V value size.
"""

import types

import jax
import numpy as np
import pytest

from mha_haiku import masks, positions
from mha_haiku.core.attention import kernels, scores
from mha_haiku.core.attention.inputs import Inputs, Weighting

LENGTHS = np.asarray([4, 0], np.int32)
PADDING = masks.padding(LENGTHS)


def inputs_of(
    batch=(2,), T=128, S=128, H=4, G=2, K=64, V=64, dtype="bfloat16", **changes
):
    """Returns shapes to attend to."""
    dtypes = dtype.split() * (3 if " " not in dtype else 1)
    shapes = (*batch, T, H, K), (*batch, S, G, K), (*batch, S, G, V)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    parts = {"bias": None, "score": scores.dot_product(), "mask": masks.causal()}
    parts |= changes
    parts["mask"] = parts["mask"].aligned(len(arrays[0].shape) - 3)
    shape_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    return Inputs(*arrays, Weighting(**jax.tree.map(shape_of, parts)))


ON_BOTH = {
    "bias": ({"bias": positions.alibi(4).aligned(1)}, "no bias"),
    "score": (
        {"score": scores.sigmoid()},
        "dot products as the score, not Sigmoid",
    ),
    "soft cap": ({"score": scores.dot_product(soft_cap=2.0)}, "no soft cap"),
    "mixed dtypes": (
        {"dtype": "bfloat16 bfloat16 float64"},
        " or bfloat16, not float64",
    ),
    "value size": ({"V": 128}, "values of the keys' size K = 64, not V = 128"),
    "nothing": ({"batch": (0,)}, "at least one score"),
    "no keys": ({"S": 0}, "at least one score"),
    "mask": ({"mask": ~PADDING}, "masks of full(), causal(), window()"),
}
ON_CUDA = {
    "float32": ({"dtype": "float32"}, "takes float16 or bfloat16, not float32"),
    "two dtypes": ({"dtype": "float16 bfloat16 float16"}, "one dtype of query, key"),
    "size": ({"K": 60, "V": 60}, "a multiple of 8 up to 128, not 60"),
    "large size": ({"K": 136, "V": 136}, "a multiple of 8 up to 128, not 136"),
    "right reach": ({"mask": masks.window(3, 2)}, "a right reach of 0, not 2"),
    "no left reach": ({"mask": masks.window(None, 2)}, "a right reach of 0, not 2"),
    "no right reach": ({"mask": masks.window(3, None)}, "not without an end"),
    "window and lengths": (
        {"mask": masks.window(3, 0) & PADDING},
        "windows without lengths",
    ),
    "more queries": (
        {"mask": masks.window(3, 0), "S": 64},
        "not of 128 queries and 64 keys",
    ),
    "one query": ({"T": 1}, "causal masks of two queries or more, not of 1"),
}
ON_TPU = {
    "float16": ({"dtype": "float16"}, "takes float32 or bfloat16, not float16"),
    "two dtypes": ({"dtype": "float32 bfloat16 float32"}, "one dtype of query, key"),
    "queries": ({"T": 192}, "multiples of 128 positions, not T = 192"),
    "keys": ({"S": 192}, "multiples of 128 positions, not S = 192"),
    "size": ({"K": 136, "V": 136}, "up to 128 or a multiple of it, not 136"),
    "window": ({"mask": masks.window(3, 0)}, "no windows"),
    "right reach": ({"mask": masks.window(None, 2)}, "no windows"),
}
REFUSALS = [
    pytest.param(platform, *case, id=f"{platform}: {name}")
    for platform, cases in (
        ("cuda", ON_BOTH | ON_CUDA),
        ("tpu", ON_BOTH | ON_TPU),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize("platform, changes, words", REFUSALS)
def test_refusal_names_the_property(platform, changes, words):
    assert kernels.refusal(inputs_of(), 0.0, platform) is None
    found = kernels.refusal(inputs_of(**changes), 0.0, platform)
    start = {"cuda": "cuDNN attention takes ", "tpu": "the TPU kernel takes "}[platform]
    assert found.startswith(start)
    assert words in found


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_dropout_is_refused(platform):
    assert kernels.refusal(inputs_of(), 0.1, platform).endswith("takes no dropout")


@pytest.mark.parametrize("platform", ["cpu", "rocm", "metal"])
def test_platforms_without_a_kernel_are_refused(platform):
    found = kernels.refusal(inputs_of(), 0.0, platform)
    assert found == f"there is no fused kernel for {platform}"


@pytest.mark.parametrize(
    "platform, changes",
    [
        ("cuda", {"dtype": "float16", "T": 77, "S": 33, "K": 24, "V": 24}),
        ("gpu", {"mask": masks.full(), "T": 1}),
        ("cuda", {"mask": masks.causal() & masks.padding(LENGTHS, LENGTHS)}),
        ("cuda", {"mask": masks.window(3, 0), "S": 256}),
        ("cuda", {"mask": PADDING, "score": scores.dot_product(0.5)}),
        ("cuda", {"batch": (), "mask": masks.padding(LENGTHS[0])}),
        ("tpu", {"dtype": "float32", "K": 256, "V": 256}),
        ("tpu", {"mask": PADDING, "K": 80, "V": 80, "S": 384}),
        ("tpu", {"mask": masks.full(), "batch": (2, 3)}),
    ],
)
def test_what_a_kernel_can_do_is_not_refused(platform, changes):
    assert kernels.refusal(inputs_of(**changes), 0.0, platform) is None


def test_refusal_is_the_same_while_being_traced():
    found = []

    def traced(inputs):
        found.append(kernels.refusal(inputs, 0.0, "cuda"))
        return 0

    jax.eval_shape(traced, inputs_of(mask=masks.causal() & PADDING))
    jax.eval_shape(traced, inputs_of(dtype="float32"))
    assert found == [None, "cuDNN attention takes float16 or bfloat16, not float32"]


@pytest.mark.parametrize(
    "version, capability, expected",
    [
        ("cuda 12080", "9.0", "cuda"),
        ("cuda 12080", "12.0", "cuda"),
        ("cuda 12080", "7.5", "cuda with compute capability 7.5"),
        ("rocm 60300", "gfx90a", "rocm"),
    ],
)
def test_platform_tells_gpus_apart(version, capability, expected, monkeypatch):
    device = types.SimpleNamespace(
        client=types.SimpleNamespace(platform_version=version),
        compute_capability=capability,
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert kernels.platform_name() == expected
    is_refused = kernels.refusal(inputs_of(), 0.0, kernels.platform_name()) is not None
    assert is_refused == (expected != "cuda")
