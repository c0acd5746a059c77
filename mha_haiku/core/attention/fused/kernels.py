"""The attention kernels of JAX for accelerators, and their limits.

They support masks made of a band and lengths.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import tiles
from mha_haiku.core.attention import scores
from mha_haiku.core.attention.inputs import Inputs
from mha_haiku.core.masks import algebra, arrays, relative

Array = jax.Array


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

        def smallest(lengths, size):
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


class Kernel(abc.ABC):
    """Values of attention by scaled dot products, under a band with lengths."""

    name: str  # for messages
    dtypes: tuple[str, ...]  # the names of supported dtypes

    @abc.abstractmethod
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: KernelMask,
        scale: float,
    ) -> tuple[Array, Array | None]:
        """Computes values and logsumexp; arbitrary where a query sees nothing.

        The mask is collapsed to N examples, and its lengths are at least 1. The
        logsumexp `[N, H, T]` has no gradient, and is None if the kernel does not return
        it.
        """

    @abc.abstractmethod
    def limits(self, inputs: Inputs, mask: KernelMask) -> Iterator[str]:
        """Yields what rules the kernel out, as the end of "the kernel takes ..."."""


@dataclasses.dataclass(frozen=True)
class CuDNN(Kernel):
    """The kernel of NVIDIA's cuDNN.

    Source: the limits of `check_is_flash_attention` in jax/_src/cudnn and of
    `validate_sdpa_support_surface` in https://github.com/NVIDIA/cudnn-frontend.
    """

    # "xla" computes the same on every platform, from the matrix of scores.
    implementation: str = "cudnn"
    name = "cuDNN attention"
    dtypes = ("float16", "bfloat16")

    def __call__(self, query, key, value, mask, scale):
        window = None if mask.left is None else (mask.left, 0)
        (key_lengths,) = mask.key_lengths or (None,)
        (query_lengths,) = mask.query_lengths or (None,)
        if mask.right is None and not mask.key_lengths and not mask.query_lengths:
            # Without any mask, gradients are NaN where all scores are below -88:
            # https://github.com/NVIDIA/cudnn-frontend/issues/1072.
            key_lengths = jnp.full(key.shape[0], key.shape[1], jnp.int32)
        is_causal = mask.right == 0  # also with a window, which only bounds the left
        if self.implementation == "cudnn":
            lengths = query_lengths, key_lengths
            return _cudnn((query, key, value), lengths, is_causal, window, scale)
        values, logsumexp = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (query, key, value)),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=window,
            implementation="xla",
            return_residual=True,
        )
        return values.astype(value.dtype), jnp.swapaxes(logsumexp, -1, -2)

    def limits(self, inputs, mask):
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


def _cudnn(arrays, lengths, is_causal, window, scale):
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
class FlashTPU(Kernel):
    """JAX's Pallas kernel of flash attention for TPUs."""

    name = "the TPU kernel"
    dtypes = ("float32", "bfloat16")

    def __call__(self, query, key, value, mask, scale):
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        num_examples, num_queries, num_heads, size = query.shape
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
            block_sizes=_block_sizes(flash, num_queries, num_keys, size),
        )
        return values.swapaxes(1, 2), None

    def limits(self, inputs, mask):
        size = inputs.query.shape[-1]
        for axis, length in zip("TS", inputs.map_shape[-2:], strict=True):
            if length % 128:
                yield f"multiples of 128 positions, not {axis} = {length}"
        if size > 128 and size % 128:
            yield f"a size K per head up to 128 or a multiple of it, not {size}"
        if mask.left is not None or mask.right not in (None, 0):
            yield "causal masks and lengths, and no windows"


def _block_sizes(flash: Any, num_queries: int, num_keys: int, size: int) -> Any:
    """Picks tiles above the kernel's default of 128 where they divide lengths."""
    most = 512 if size <= 128 else 256  # tiles of all operands share fast memory
    rows, columns = (
        max(n for n in (128, 256, 512) if n <= most and not count % n)
        for count in (num_queries, num_keys)
    )
    names = [field.name for field in dataclasses.fields(flash.BlockSizes)]
    sizes = {name: rows if "block_q" in name else columns for name in names}
    return flash.BlockSizes(**sizes | {"block_b": 1})


def translated(mask: algebra.Mask) -> KernelMask | None:
    """Translates an aligned mask (its leaves may be shapes); None if not a band."""
    match mask:
        case algebra.Full():
            return KernelMask()
        case relative.Band(left, right):
            return KernelMask(left, right)
        case arrays.Padding(keys, queries):
            return KernelMask(
                key_lengths=(keys,), query_lengths=() if queries is None else (queries,)
            )
        case arrays.ValidLens(keys) if keys.shape[-1] == 1:
            return KernelMask(key_lengths=(keys,))
        case algebra.Intersection(left, right):
            first, second = translated(left), translated(right)
            return None if first is None or second is None else first & second
    return None


def _shorter(first: int | None, second: int | None) -> int | None:
    return min((x for x in (first, second) if x is not None), default=None)
