"""Divergences between heads, which compare the rows of two heads tile by tile."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mha_haiku.core.attention.factors import Factors
from mha_haiku.core.attention.tiled import engine

# Weights compared at once, over all examples and heads; and keys.
_SCORES_COMPARED, _KEYS_COMPARED = 2**18, 256


@jax.jit
def divergence(factors: Factors, other: Factors | None) -> Array:
    """Computes mean Jensen-Shannon divergences; see `AttentionMap.divergence`.

    The divergence of two rows is the entropy of their mean less their mean entropy. It
    needs the rows of all heads at once, so this is not a walk over single heads.
    """
    maps = [factors] if other is None else [factors, other]
    shapes = [(*map_.shape[:-3], *map_.shape[-2:]) for map_ in maps]
    if shapes[0] != shapes[-1]:
        raise ValueError(
            "maps that are compared must have the same batch axes, T and S; got "
            f"shapes {maps[0].shape} and {maps[1].shape}."
        )
    *batch_shape, num_heads, num_queries, num_keys = factors.shape
    num_others = maps[-1].shape[-3]
    dtype = factors.logsumexp.dtype
    zeros = jnp.zeros((*batch_shape, num_heads, num_others), dtype)
    ours, theirs = _pairs_of_heads(num_heads, None if other is None else num_others)
    if not num_queries or not num_keys or not ours.size:
        return zeros
    maps, counts = zip(*map(engine.with_counted_rows, maps), strict=True)
    weighs = [(x > 0).astype(x.dtype) for x in counts]
    sees = [(x != 0).astype(x.dtype) for x in counts]  # NaN included
    width = min(num_keys, _KEYS_COMPARED)
    num_rows = sum(math.prod(x.shape[:-2]) for x in maps)
    height = _SCORES_COMPARED // max(num_rows * width, 1)
    height = min(max(height, 1), num_queries)

    def entropy(weights: Any) -> Array:
        # Negative weights, which are not probabilities, give NaN.
        return -(weights * jnp.log(jnp.where(weights == 0, 1, weights))).sum(-1)

    def pairing(arrays: list[Array], axis: int) -> Callable:
        """Makes a function from n to both sides of the pairs of row n."""
        first, last = arrays[0], arrays[-1]
        if other is not None:
            return lambda n: (lax.dynamic_slice_in_dim(first, n, 1, axis), last)
        twice = jnp.concatenate([last, last], axis)
        return lambda n: (first, lax.dynamic_slice_in_dim(twice, n, num_heads, axis))

    def compared(weights: list[Array], counted: list[Array]) -> Array:
        entropies = [entropy(each) for each in weights]
        arrays = (weights, -3), (entropies, -2), (counted, -2)
        pairings = [pairing(*each) for each in arrays]

        @jax.checkpoint
        def of_pairs(n: Array):
            weights, entropies, counted = (pair(n) for pair in pairings)
            rises = entropy(sum(weights) / 2) - sum(entropies) / 2
            return (rises * math.prod(counted)).sum(-1)

        return lax.map(of_pairs, jnp.arange(len(ours)))

    @jax.checkpoint  # so that the gradient keeps nothing of size T x S
    def of_tile(start: Array):
        rows, columns = start[0] + jnp.arange(height), start[1] + jnp.arange(width)
        at = jnp.minimum(rows, num_queries - 1)
        keys = jnp.minimum(columns, num_keys - 1)
        is_new = (rows < num_queries)[:, None] & (columns < num_keys)[None]
        weights = [jnp.where(is_new, map_.weights_at(at, keys), 0) for map_ in maps]
        return lax.cond(  # comparing pairs of heads costs more than all weights
            (weights[0] != 0).any() | (weights[-1] != 0).any(),
            compared,
            lambda weights, counted: jnp.zeros(sums_shape, dtype),
            weights,
            [jnp.take(x, at, -1) for x in weighs],
        )

    tops, lefts = jnp.arange(0, num_queries, height), jnp.arange(0, num_keys, width)
    starts = jnp.stack(jnp.meshgrid(tops, lefts), -1).reshape(-1, 2)
    sums_shape = len(ours), *batch_shape, ours.shape[1]
    sums = jnp.zeros(sums_shape, dtype)
    sums, _ = lax.scan(lambda sums, x: (sums + of_tile(x), None), sums, starts)
    sums = jnp.moveaxis(sums, 0, -2)
    total = zeros.at[..., ours, theirs].set(sums)
    if other is None:
        total = total.at[..., theirs, ours].set(sums)
    in_both = functools.partial(jnp.einsum, "...ht,...gt->...hg")
    count = in_both(weighs[0], weighs[-1])
    has_nan = in_both(sees[0], sees[-1]) > count
    mean = jnp.maximum(total, 0) / jnp.maximum(count, 1)
    return jnp.where(has_nan, jnp.nan, mean)


def _pairs_of_heads(num_heads: int, num_others: int | None) -> np.ndarray:
    """Lists pairs of heads to compare, `[2, N, M]`: a row of M at once.

    Without other heads (None) each head is paired with itself and the half of all heads
    after it, in a circle, so that no pair of two heads is left out.
    """
    if num_others is None:
        apart = np.arange(num_heads // 2 + 1)[:, None]
        first = np.broadcast_to(np.arange(num_heads), (len(apart), num_heads))
        return np.stack([first, (first + apart) % max(num_heads, 1)])
    return np.stack(np.meshgrid(range(num_heads), range(num_others), indexing="ij"))
