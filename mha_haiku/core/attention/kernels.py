"""Attention by JAX's kernels for accelerators, with our guarantees.

N examples over all batch axes. Kernels support fewer masks (a band with lengths),
dtypes and sizes than we do: `refusal` says why a kernel cannot take a call. Nor do they
support fully masked queries and masked NaN, which are handled here.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mha_haiku.core import tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.inputs import Inputs, Nonfinite
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.tiled import blockwise
from mha_haiku.core.masks import algebra, array_masks, relative

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


def attend(
    inputs: Inputs,
    dropout_rate: float,
    kernel: "Kernel | None" = None,
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


def _limits(inputs: Inputs, dropout_rate: float, kernel: "Kernel") -> Iterator[str]:
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
    mask = translated(weighting.mask)
    if weighting.origin != tiles.Origin():
        yield "only queries that start at position 0, not another first_query"
    if mask is None:
        yield (
            "masks of full(), causal(), window() and padding(), joined by &, and no "
            "others"
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


def _differentiable_backward(inputs: Inputs, cotangent: Array) -> tuple[Array, Inputs]:
    _, pullback = jax.vjp(lambda x: _blockwise_logsumexp(x).logsumexp, inputs)
    return jnp.zeros_like(cotangent), *pullback(cotangent)


_differentiable.defvjp(lambda *arguments: arguments, _differentiable_backward)


def _by_kernel(inputs: Inputs, kernel: "Kernel") -> tuple[Array, Array | None]:
    """Calls the kernel: values `[B..., T, H, V]`, and logsumexp or None."""
    # Fully masked queries get 0 and -inf, queries that see NaN get NaN. Replaced rows
    # get no cotangent, and inputs that the kernel must ignore are zeros, so that
    # neither their content nor the kernel's treatment of them changes anything.
    *batch_shape, _, num_queries, num_keys = inputs.map_shape
    mask, score = translated(inputs.weighting.mask), inputs.weighting.score
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

    def count(positions: Array) -> Array:
        positions = jnp.broadcast_to(positions, queries.shape[:2])
        return jnp.take_along_axis(before, positions[..., None], axis=1)

    seen = (count(stop) > count(start))[..., None]
    return queries[..., None] | scores.repeat_heads(seen, queries.shape[-1])


# --- The kernels, and the masks that they support


@tiles.pytree
class KernelMask:
    """Keys from t - left to t + right within lengths; None is unbounded."""

    left: int | None = tiles.static(default=None)  # positions that a query sees back
    right: int | None = tiles.static(default=None)  # positions that it sees ahead
    # Numbers of keys, `[B...]` or `[B..., 1]`; the smallest counts.
    key_lengths: tuple[Array | np.ndarray, ...] = ()
    # Numbers of queries that see any key, of the same shapes.
    query_lengths: tuple[Array | np.ndarray, ...] = ()

    def __and__(self, other: "KernelMask") -> "KernelMask":
        return KernelMask(
            _shorter(self.left, other.left),
            _shorter(self.right, other.right),
            self.key_lengths + other.key_lengths,
            self.query_lengths + other.query_lengths,
        )

    def collapsed(
        self, batch_shape: tuple[int, ...], num_queries: int, num_keys: int
    ) -> "KernelMask":
        """Collapses a mask of N examples to at most one length `[N]` of each kind."""
        batch_ndim = len(batch_shape)

        def smallest(lengths: tuple[Array | np.ndarray, ...], size: int):
            parts = [
                jnp.broadcast_to(x.reshape(x.shape[:batch_ndim]), batch_shape)
                for x in (jnp.asarray(x).astype(jnp.int32) for x in lengths)
            ]
            least = jnp.clip(functools.reduce(jnp.minimum, parts), 0, size)
            return (least.reshape(-1),)

        return KernelMask(
            self.left,
            self.right,
            self.key_lengths and smallest(self.key_lengths, num_keys),
            self.query_lengths and smallest(self.query_lengths, num_queries),
        )

    def seen_keys(self, num_queries: int, num_keys: int) -> tuple[Array, Array]:
        """Finds (start, stop) of the keys each query sees, for a collapsed mask.

        Both are `[N, T]`, or `[1, T]` if all examples are the same.
        """
        queries = jnp.arange(num_queries)[None]
        start, stop = jnp.zeros_like(queries), jnp.full_like(queries, num_keys)
        if self.left is not None:
            start = jnp.maximum(queries - min(self.left, num_queries), 0)
        if self.right is not None:
            stop = jnp.minimum(queries + min(self.right, num_keys) + 1, stop)
        for length in self.key_lengths:
            stop = jnp.minimum(stop, length[:, None])
        for length in self.query_lengths:
            stop = jnp.where(queries < length[:, None], stop, 0)
        return jnp.minimum(start, stop), stop


# A kernel has a name for messages, and the names of the dtypes that it takes. Its call
# computes values by scaled dot products under a band with lengths, collapsed to N
# examples and at least 1, and the logsumexp `[N, H, T]`, without a gradient, or None;
# both are arbitrary where a query sees nothing. `limits` yields what rules the kernel
# out, as the end of "the kernel takes ...".


@dataclasses.dataclass(frozen=True)
class CuDNN:
    """The kernel of NVIDIA's cuDNN.

    Source: the limits of `check_is_flash_attention` in jax/_src/cudnn and of
    `validate_sdpa_support_surface` in https://github.com/NVIDIA/cudnn-frontend.
    """

    name = "cuDNN attention"
    dtypes = ("float16", "bfloat16")

    def __call__(
        self, query: Array, key: Array, value: Array, mask: KernelMask, scale: float
    ) -> tuple[Array, Array | None]:
        window = None if mask.left is None else (mask.left, 0)
        (key_lengths,) = mask.key_lengths or (None,)
        (query_lengths,) = mask.query_lengths or (None,)
        if mask.right is None and not mask.key_lengths and not mask.query_lengths:
            # Without any mask, gradients are NaN where all scores are below -88:
            # https://github.com/NVIDIA/cudnn-frontend/issues/1072.
            key_lengths = jnp.full(key.shape[0], key.shape[1], jnp.int32)
        is_causal = mask.right == 0  # also with a window, which only bounds the left
        lengths = query_lengths, key_lengths
        return self.run((query, key, value), lengths, is_causal, window, scale)

    def limits(self, inputs: Inputs, mask: KernelMask) -> Iterator[str]:
        *_, num_queries, num_keys = inputs.map_shape
        size = inputs.query.shape[-1]
        if size % 8 or size > 128:
            yield f"a size K per head that is a multiple of 8 up to 128, not {size}"
        if mask.right not in (None, 0):
            yield f"windows with a right reach of 0, not {mask.right}"
        if mask.left is not None:
            if mask.right is None:
                yield "windows with a right reach of 0, not without an end"
            if mask.key_lengths or mask.query_lengths:
                yield "windows without lengths"
            if num_queries > num_keys:
                yield (
                    "windows of no more queries than keys, not of "
                    f"{num_queries} queries and {num_keys} keys"
                )
        if mask.right == 0 and num_queries == 1:
            yield "causal masks of two queries or more, not of 1"

    def run(
        self,
        arrays: tuple[Array, ...],
        lengths: Iterable,
        is_causal: bool,
        window: tuple[int, int] | None,
        scale: float,
    ) -> Any:
        """Calls cuDNN with lengths of queries and keys, or None."""
        # `jax.nn.dot_product_attention` calls the same function, which is private, but
        # rounds the logsumexp to the dtype of the values: in bfloat16 weights would be
        # wrong by up to 3 percent where it is below 16, and more above.
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        kind = ["NO_MASK", "CAUSAL"][is_causal]
        if any(length is not None for length in lengths):
            kind = ["PADDING", "PADDING_CAUSAL"][is_causal]
            lengths = (
                jnp.full(len(x), x.shape[1], jnp.int32) if length is None else length
                for x, length in zip(arrays[:2], lengths, strict=True)
            )
        query_lengths, key_lengths = lengths
        return cudnn.dot_product_attention(
            *arrays,
            q_seqlen=query_lengths,
            kv_seqlen=key_lengths,
            scale=scale,
            mask_type=cudnn.MaskType[kind],
            # cuDNN's window includes the query's position.
            sliding_window_length=None if window is None else window[0] + 1,
            return_residual=True,
        )


@dataclasses.dataclass(frozen=True)
class FlashTPU:
    """JAX's Pallas kernel of flash attention for TPUs."""

    name = "the TPU kernel"
    dtypes = ("float32", "bfloat16")

    def __call__(
        self, query: Array, key: Array, value: Array, mask: KernelMask, scale: float
    ) -> tuple[Array, None]:
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        num_examples, num_queries, num_heads, _ = query.shape
        num_keys = key.shape[1]
        key, value = (scores.repeat_heads(x, num_heads) for x in (key, value))
        segment_ids = None
        for length in mask.key_lengths:
            ids = jnp.arange(num_keys)[None] < length[:, None]
            segment_ids = flash.SegmentIds(
                jnp.ones((num_examples, num_queries), jnp.int32), ids.astype(jnp.int32)
            )
        values = flash.flash_attention(
            *(x.swapaxes(1, 2) for x in (query, key, value)),
            segment_ids=segment_ids,
            causal=mask.right == 0,
            sm_scale=scale,
        )
        return values.swapaxes(1, 2), None

    def limits(self, inputs: Inputs, mask: KernelMask) -> Iterator[str]:
        size = inputs.query.shape[-1]
        for axis, length in zip("TS", inputs.map_shape[-2:], strict=True):
            if length % 128:
                yield f"multiples of 128 positions, not {axis} = {length}"
        if size > 128 and size % 128:
            yield f"a size K per head up to 128 or a multiple of it, not {size}"
        if mask.left is not None or mask.right not in (None, 0):
            yield "causal masks and lengths, and no windows"


def translated(mask: algebra.Mask) -> KernelMask | None:
    """Translates an aligned mask (its leaves may be shapes); None if not a band."""
    match mask:
        case algebra.Full():
            return KernelMask()
        case relative.Band(left, right):
            return KernelMask(left, right)
        case array_masks.Padding(keys, queries):
            return KernelMask(
                key_lengths=(keys,), query_lengths=() if queries is None else (queries,)
            )
        case algebra.Intersection(left, right):
            first, second = translated(left), translated(right)
            return None if first is None or second is None else first & second
    return None


def _shorter(first: int | None, second: int | None) -> int | None:
    return min((x for x in (first, second) if x is not None), default=None)


Kernel = CuDNN | FlashTPU
_KERNELS: dict[str, Kernel] = {"gpu": CuDNN(), "cuda": CuDNN(), "tpu": FlashTPU()}
