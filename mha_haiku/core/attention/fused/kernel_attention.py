"""Attention by the kernel that JAX has for the accelerator, under our own laws.

`B...` batch axes, N examples of all batch axes, T query positions, S key positions, H
query heads, G key heads, K query/key size and V value size per head. Kernels know fewer
masks, dtypes and sizes than we do: `refusal` says why a call is none of theirs. Nor do
they know fully masked queries and masked NaN, which are handled around them here.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mha_haiku.core import tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.fused import kernel_masks, kernels
from mha_haiku.core.attention.inputs import Inputs, Nonfinite
from mha_haiku.core.attention.tiled import blockwise

Array = jax.Array

_KERNELS = {
    "gpu": kernels.CuDNN(),
    "cuda": kernels.CuDNN(),
    "tpu": kernels.FlashTPU(),
}
_OLDEST_CAPABILITY = 8.0  # of the GPUs that cuDNN attention runs on: Ampere


def refusal(inputs: Inputs, dropout_rate: float, platform: str) -> str | None:
    """Returns why no kernel can do a call, as part of a sentence; None if one can.

    Only shapes, dtypes and the kinds of mask, bias and score matter, so that the leaves
    may be `jax.ShapeDtypeStruct`; the platform "gpu" is taken for NVIDIA's.
    """
    kernel = _KERNELS.get(platform)
    if kernel is None:
        return f"there is no fused kernel for {platform}"
    limit = next(_limits(inputs, dropout_rate, kernel), None)
    return None if limit is None else f"{kernel.name} takes {limit}"


def suits(inputs: Inputs, dropout_rate: float, platform: str) -> bool:
    """Returns whether "auto" is to take a kernel; see `implementations.register`."""
    if platform == jax.default_backend():
        platform = platform_name()
    return refusal(inputs, dropout_rate, platform) is None


def attend(
    inputs: Inputs,
    dropout_rate: float,
    kernel: kernels.Kernel | None = None,
) -> tuple[Array, Array]:
    """Returns values `[B..., T, H, V]` and logsumexp `[B..., H, T]`.

    Only the values, and their gradient, are the kernel's. The logsumexp is that of a
    blockwise pass of ours, which the compiler drops where the map is not read: cuDNN's
    comes back from `jax.nn` rounded to the dtype of the values, which in bfloat16 makes
    weights wrong by up to 3 percent where it is below 16, and more above, and the TPU
    kernel's does not come back at all.

    Raises:
      ValueError: If the platform has no kernel, or it cannot do the call.
    """
    if kernel is None:
        where = platform_name()
        why_not = refusal(inputs, dropout_rate, where)
        if why_not is not None:
            raise ValueError(
                f"implementation='fused' cannot do this call: {why_not}; 'auto' takes "
                "what can."
            )
        kernel = _KERNELS[where]
    logsumexp = blockwise.Blockwise()(inputs, dropout_rate)[1]
    return _values(inputs.zeroed(), kernel), logsumexp


def platform_name() -> str:
    """Returns where computations run.

    `jax.default_backend()` says "gpu" of AMD's and of NVIDIA's oldest too.
    """
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
    mask = kernel_masks.translated(weighting.mask)
    if weighting.origin != tiles.Origin():
        yield "queries from position 0 on, and no other first_query"
    if mask is None:
        yield (
            "masks of full(), causal(), window(), padding() and valid_lens() of "
            "[B...], joined by & and not shifted, and no others"
        )
    else:
        yield from kernel.limits(inputs, mask)


def _values(inputs: Inputs, kernel: kernels.Kernel) -> Array:
    """Returns `[B..., T, H, V]`: 0 for fully masked queries, NaN for those seeing NaN.

    Rows that are replaced get no cotangent, and what the kernel is to ignore is zero,
    so that neither its content nor what the kernel makes of it changes anything.
    """
    *batch_shape, _, num_queries, num_keys = inputs.map_shape
    mask = kernel_masks.translated(inputs.weighting.mask)
    mask = mask.collapsed(tuple(batch_shape), num_queries, num_keys)
    start, stop = mask.seen_keys(num_queries, num_keys)
    fully_masked = (start == stop)[..., None, None]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in inputs[:3])
    query = jnp.where(fully_masked, 0, query)
    for length in mask.key_lengths:
        beyond = (jnp.arange(num_keys)[None] >= length[:, None])[..., None, None]
        key, value = (jnp.where(beyond, 0, x) for x in (key, value))
    # Without any key kernels may give NaN, and 0 x NaN as gradients; those rows are
    # fully masked anyway. https://github.com/NVIDIA/cudnn-frontend/issues/943
    at_least_one = jax.tree.map(lambda length: jnp.maximum(length, 1), mask)
    scale = float(inputs.weighting.score.scale_of(query.shape[-1]))
    values = kernel(query, key, value, at_least_one, scale)
    if inputs.nonfinite is not None:
        values = jnp.where(
            _sees_nonfinite(inputs.nonfinite, start, stop), jnp.nan, values
        )
    values = jnp.where(fully_masked, 0, values)
    return values.reshape(*inputs.query.shape[:-1], -1)


def _sees_nonfinite(nonfinite: Nonfinite, start: Array, stop: Array) -> Array:
    """Returns which queries are nonfinite or see a nonfinite key, `[N, T, H, 1]`.

    `start` and `stop`, `[N, T]` or `[1, T]`, are the keys that each query sees.
    """
    queries, keys = (x.reshape(-1, *x.shape[-2:]) for x in nonfinite)
    before = jnp.cumsum(keys, axis=1, dtype=jnp.int32)
    before = jnp.pad(before, [(0, 0), (1, 0), (0, 0)])  # [N, S + 1, G]

    def count(positions):
        positions = jnp.broadcast_to(positions, queries.shape[:2])
        return jnp.take_along_axis(before, positions[..., None], axis=1)

    seen = (count(stop) > count(start))[..., None]
    return queries[..., None] | scores.repeat_heads(seen, queries.shape[-1])
