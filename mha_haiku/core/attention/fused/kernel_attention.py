"""Attention by JAX's kernel for the accelerator, with our guarantees.

N examples over all batch axes. Kernels support fewer masks, dtypes and sizes than we
do: `refusal` says why a kernel cannot take a call. Nor do they support fully masked
queries and masked NaN, which are handled here.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.fused import kernels
from mha_haiku.core.attention.inputs import Inputs, Nonfinite
from mha_haiku.core.attention.log_sum import LogSum
from mha_haiku.core.attention.tiled import blockwise

Array = jax.Array

_KERNELS: dict[str, kernels.Kernel] = {
    "gpu": kernels.CuDNN(),
    "cuda": kernels.CuDNN(),
    "tpu": kernels.FlashTPU(),
}
_OLDEST_CAPABILITY = 8.0  # cuDNN attention runs on Ampere GPUs and later


def refusal(inputs: Inputs, dropout_rate: float, platform: str) -> str | None:
    """Explains why no kernel can take a call, as part of a sentence; None if one can.

    Only shapes, dtypes and the kinds of mask, bias and score matter, so that the leaves
    may be `jax.ShapeDtypeStruct`; the platform "gpu" means NVIDIA.
    """
    kernel = _KERNELS.get(platform)
    if kernel is None:
        return f"there is no fused kernel for {platform}"
    limit = next(_limits(inputs, dropout_rate, kernel), None)
    return None if limit is None else f"{kernel.name} takes {limit}"


def suits(inputs: Inputs, dropout_rate: float, platform: str) -> bool:
    """Decides whether "auto" uses a kernel; see `implementations.register`."""
    if platform == jax.default_backend():
        platform = platform_name()
    return refusal(inputs, dropout_rate, platform) is None


def attend(
    inputs: Inputs,
    dropout_rate: float,
    kernel: kernels.Kernel | None = None,
) -> tuple[Array, Array | LogSum]:
    """Computes values `[B..., T, H, V]` and logsumexp `[B..., H, T]`.

    The kernel computes the values, their gradient and, with cuDNN, the logsumexp. The
    TPU kernel returns no logsumexp, so a blockwise pass computes it, which the compiler
    drops where the map is not read. The gradient of a logsumexp is always blockwise.

    Raises ValueError if no kernel can take the call.
    """
    if kernel is None:
        where = platform_name()
        why_not = refusal(inputs, dropout_rate, where)
        if why_not is not None:
            raise ValueError(
                f"implementation='fused' cannot do this call: {why_not}; 'auto' uses "
                "an implementation that can."
            )
        kernel = _KERNELS[where]
    values, logsumexp = _by_kernel(inputs.zeroed(), kernel)
    if logsumexp is None:
        return values, _blockwise_logsumexp(inputs)
    return values, _differentiable(lax.stop_gradient(logsumexp), inputs)


def platform_name() -> str:
    """Returns the platform, with AMD and old GPUs told apart from "cuda"."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return "rocm"
    capability = device.compute_capability
    if float(capability) < _OLDEST_CAPABILITY:
        return f"cuda with compute capability {capability}"
    return "cuda"


def _limits(inputs, dropout_rate, kernel) -> Iterator[str]:
    """Yields what rules a kernel out, as the end of "the kernel takes ..."."""
    weighting, score = inputs.weighting, inputs.weighting.score
    if weighting.bias is not None:
        yield "no bias"
    if dropout_rate:
        yield "no dropout"
    if not isinstance(score, scores.DotProduct):
        yield f"dot products as the score, not {type(score).__name__}"
    elif score.soft_cap is not None:
        yield "no soft cap of the scores"
    names = [jnp.dtype(x.dtype).name for x in inputs[:3]]
    for name in names:
        if name not in kernel.dtypes:
            yield f"{' or '.join(kernel.dtypes)}, not {name}"
    if len(set(names)) > 1:
        yield f"one dtype of query, key and value, not {', '.join(names)}"
    key_size, value_size = inputs.key.shape[-1], inputs.value.shape[-1]
    if value_size != key_size:
        yield f"values of the keys' size K = {key_size}, not V = {value_size}"
    if not math.prod(inputs.map_shape):
        yield f"at least one score, not a map of shape {inputs.map_shape}"
    mask = kernels.translated(weighting.mask)
    if weighting.origin != tiles.Origin():
        yield "only queries that start at position 0, not another first_query"
    if mask is None:
        yield (
            "masks of full(), causal(), window(), padding() and valid_lens() of "
            "[B...], joined by &, and no others"
        )
    else:
        yield from kernel.limits(inputs, mask)


def _blockwise_logsumexp(inputs: Inputs) -> LogSum:
    return blockwise.Blockwise()(inputs, 0.0)[1]


@jax.custom_vjp
def _differentiable(logsumexp: Array, inputs: Inputs) -> Array:
    """Gives a logsumexp the gradient of a blockwise pass."""
    del inputs
    return logsumexp


def _differentiable_backward(inputs, cotangent):
    _, pullback = jax.vjp(lambda x: _blockwise_logsumexp(x).logsumexp, inputs)
    return jnp.zeros_like(cotangent), *pullback(cotangent)


_differentiable.defvjp(lambda *given: given, _differentiable_backward)


def _by_kernel(inputs: Inputs, kernel: kernels.Kernel) -> tuple[Array, Array | None]:
    """Calls the kernel: values `[B..., T, H, V]`, and logsumexp or None."""
    # Fully masked queries get 0 and -inf, queries that see NaN get NaN. Replaced rows
    # get no cotangent, and inputs that the kernel must ignore are zeros, so that
    # neither their content nor the kernel's treatment of them changes anything.
    *batch_shape, _, num_queries, num_keys = inputs.map_shape
    mask, score = kernels.translated(inputs.weighting.mask), inputs.weighting.score
    assert mask is not None and isinstance(score, scores.DotProduct)  # see `_limits`
    mask = mask.collapsed(tuple(batch_shape), num_queries, num_keys)
    start, stop = mask.seen_keys(num_queries, num_keys)
    fully_masked = (start == stop)[..., None, None]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in inputs[:3])
    query = jnp.where(fully_masked, 0, query)
    for length in mask.key_lengths:
        beyond = (jnp.arange(num_keys)[None] >= length[:, None])[..., None, None]
        key, value = (jnp.where(beyond, 0, x) for x in (key, value))
    # With no keys at all, kernels may give NaN, and 0 x NaN as gradients; those rows
    # are fully masked anyway. https://github.com/NVIDIA/cudnn-frontend/issues/943
    at_least_one = jax.tree.map(lambda length: jnp.maximum(length, 1), mask)
    scale = float(score.scale_of(query.shape[-1]))
    values, logsumexp = kernel(query, key, value, at_least_one, scale)
    sees_nan = None
    if inputs.nonfinite is not None:
        sees_nan = _sees_nonfinite(inputs.nonfinite, start, stop)  # [N, T, H, 1]
        values = jnp.where(sees_nan, jnp.nan, values)
    values = jnp.where(fully_masked, 0, values)
    values = values.reshape(*inputs.query.shape[:-1], -1)
    if logsumexp is None:
        return values, None
    rows = jnp.swapaxes(logsumexp, -1, -2)[..., None]  # [N, T, H, 1]
    rows = rows if sees_nan is None else jnp.where(sees_nan, jnp.nan, rows)
    rows = jnp.where(fully_masked, -jnp.inf, rows)
    logsumexp = jnp.swapaxes(rows[..., 0], -1, -2)
    return values, logsumexp.reshape(inputs.map_shape[:-1])


def _sees_nonfinite(nonfinite: Nonfinite, start: Array, stop: Array) -> Array:
    """Marks queries that are nonfinite or see a nonfinite key, `[N, T, H, 1]`."""
    queries, keys = (x.reshape(-1, *x.shape[-2:]) for x in nonfinite)
    before = jnp.cumsum(keys, axis=1, dtype=jnp.int32)
    before = jnp.pad(before, [(0, 0), (1, 0), (0, 0)])  # [N, S + 1, G]

    def count(positions):
        positions = jnp.broadcast_to(positions, queries.shape[:2])
        return jnp.take_along_axis(before, positions[..., None], axis=1)

    seen = (count(stop) > count(start))[..., None]
    return queries[..., None] | scores.repeat_heads(seen, queries.shape[-1])
