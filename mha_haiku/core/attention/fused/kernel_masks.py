"""Masks in the terms that kernels of accelerators know: a band and lengths."""

import functools

import jax
import jax.numpy as jnp

from mha_haiku.core import tiles
from mha_haiku.core.masks import algebra, lengths, relative

Array = jax.Array


@tiles.pytree
class KernelMask:
    """Keys from t - left to t + right within lengths; what is None has no end."""

    left: int | None = tiles.static(None)  # how far a query sees back, in positions
    right: int | None = tiles.static(None)  # how far it sees ahead
    # Numbers of keys, of which the smallest counts; `[B...]` or `[B..., 1]` each.
    key_lengths: tuple[Array, ...] = ()
    # Numbers of queries that see anything, of the same shapes.
    query_lengths: tuple[Array, ...] = ()

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

        Each is `[N, T]`, or `[1, T]` where the examples are alike.
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


def translated(mask: algebra.Mask) -> KernelMask | None:
    """Translates an aligned mask, also of shapes alone; None where it is no band."""
    match mask:
        case algebra.Full():
            return KernelMask()
        case relative.Band(left, right):
            return KernelMask(left, right)
        case lengths.Padding(keys, queries):
            return KernelMask(
                key_lengths=(keys,), query_lengths=() if queries is None else (queries,)
            )
        case lengths.ValidLens(keys) if keys.shape[-1] == 1:
            return KernelMask(key_lengths=(keys,))
        case algebra.Intersection(left, right):
            parts = translated(left), translated(right)
            return None if None in parts else parts[0] & parts[1]
    return None


def _shorter(first: int | None, second: int | None) -> int | None:
    return min((x for x in (first, second) if x is not None), default=None)
