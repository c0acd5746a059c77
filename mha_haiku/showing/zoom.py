"""What is shown of an attention map besides weights: masks, channels, finer parts.

Pure functions of maps, for the inside of a program. B... batch axes, H heads, T query
and S key positions, P and Q bins of these; n patches of a head, of R x R cells each.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mha_haiku.core import attention, tiles
from mha_haiku.core.attention import scores

Array = jax.Array

PATCHES = (2, 4, 6)
SIDE = 32
_FACTOR = 8  # between the grains of a level and of the next
_TILE = 2**20  # weights that are computed at once


class Patches(NamedTuple):
    """Parts of pooled maps at a finer grain, where the mass lies.

    Attributes:
      places: `[B..., H, n, 3]` integers: the first query and the first key of a patch,
        and how many positions its bins have. Bins may lie past the end of the map.
      weights: `[B..., H, n, R, R]`, pooled as `AttentionMap.pooled` does.
    """

    places: Array
    weights: Array


def masked_cells(
    attention_map: attention.AttentionMap,
    rows: int | None = None,
    columns: int | None = None,
) -> Array:
    """Marks cells without weight because the mask forbids it, `[B..., H, P, Q]`.

    H is 1 where all heads have the same mask. Of a map that is pooled to at most so
    many rows and columns, a cell counts as masked if it lies outside of the keys
    between the first and the last that a query of its bin may attend to.
    """
    mask, origin = attention_map.weighting.mask, attention_map.weighting.origin
    *batch, heads, num_queries, num_keys = attention_map.shape
    if not mask.has_heads():
        heads = 1
    if rows is None or columns is None:
        at = origin.at(np.arange(num_queries), np.arange(num_keys))
        masked = tiles.lifted(~mask.aligned_tile(*at), len(batch) + 3)
        return jnp.broadcast_to(masked, (*batch, heads, num_queries, num_keys))
    query_edges = attention.bin_edges(num_queries, rows)
    key_edges = jnp.asarray(attention.bin_edges(num_keys, columns))[None]

    def of_head(index):
        *example, head = jnp.unravel_index(index, (*batch, heads))
        own = mask.at_head(tuple(example), head)
        keys = origin.key, origin.key + num_keys
        ranges = [
            own.key_range((origin.query + start, origin.query + stop), keys)
            for start, stop in zip(
                query_edges[:-1].tolist(), query_edges[1:].tolist(), strict=True
            )
        ]
        first, last = jnp.asarray(ranges).T[..., None] - origin.key
        return (
            (key_edges[:, 1:] <= first) | (key_edges[:, :-1] >= last) | (first >= last)
        )

    masked = jax.vmap(of_head)(jnp.arange(math.prod(batch) * heads))
    return masked.reshape(*batch, heads, *masked.shape[1:])


def channels(attention_map: attention.AttentionMap) -> tuple[Array, Array, bool]:
    """Computes queries and keys whose products sum over channels to the scores.

    They are scaled queries `[B..., H, T, K]`, keys `[B..., H, S, K]`, and whether the
    scores are these sums alone: a dot product without a bias or a soft cap.
    """
    weighting, heads = attention_map.weighting, attention_map.shape[-3]
    score = weighting.score
    is_product = isinstance(score, scores.DotProduct)
    query = attention_map.query
    if is_product:
        query = query * score.scale_of(query.shape[-1])
    key = scores.repeat_heads(attention_map.key, heads)
    exact = is_product and score.soft_cap is None and weighting.bias is None
    return jnp.swapaxes(query, -2, -3), jnp.swapaxes(key, -2, -3), exact


def patches(
    attention_map: attention.AttentionMap,
    pooled: Array,
    *,
    counts: Sequence[int] = PATCHES,
    side: int = SIDE,
) -> Patches | None:
    """Computes finer parts of a pooled map, down to single tokens where the mass lies.

    At each level a head has the parts with the most mass: of the pooled map first, then
    of the parts that the level before has chosen, at a grain that is 8 times as fine.

    Args:
      attention_map: The map, `[B..., H, T, S]`.
      pooled: `[B..., H, P, Q]`, what `attention_map.pooled` gives of all of it. Where
        its bins are single positions there are no parts: None.
      counts: The number of parts of a head at each level; the last is of all further
        levels too.
      side: R, bins along the sides of a part; no more than there are positions.
    """
    shape = attention_map.shape
    *batch, heads, num_queries, num_keys = shape
    edges = [
        attention.bin_edges(size, bins)
        for size, bins in zip(shape[-2:], pooled.shape[-2:], strict=True)
    ]
    width = max(int(each[1]) for each in edges)
    if width == 1 or not heads:
        return None
    side = min(side, max(shape[-2:]))
    flat = math.prod(batch) * heads
    mass = pooled.reshape(flat, *pooled.shape[-2:]) * np.diff(edges[0])[None, :, None]
    # Of each head the parts to look into: where they start, and their mass by cell.
    starts = jnp.zeros((flat, 1, 2), jnp.int32)
    mass, cells, parts, level = mass[:, None], edges, [], 0
    while width > 1:
        width = _finer(width)
        count = counts[min(level, len(counts) - 1)]
        ends = [int(each[-1]) for each in cells]
        regions = [np.arange(0, end, side * width) for end in ends]
        shares = [
            _shares(own, region, side * width)
            for own, region in zip(cells, regions, strict=True)
        ]
        within = jnp.einsum("ip,nkpq,jq->nkij", shares[0], mass, shares[1])
        grid = np.stack(np.meshgrid(*regions, indexing="ij"), -1).astype(np.int32)
        starts = starts[:, :, None, None] + grid[None, None]
        candidates = jnp.nan_to_num(within.reshape(flat, -1))
        # Regions past the end have no mass, and come last.
        _, best = lax.top_k(candidates, min(count, candidates.shape[1]))
        starts = jnp.take_along_axis(starts.reshape(flat, -1, 2), best[..., None], 1)
        weights = _of_places(attention_map, starts, width, side)
        widths = jnp.full((*starts.shape[:2], 1), width, jnp.int32)
        parts.append((jnp.concatenate([starts, widths], -1), weights))
        mass, level = weights, level + 1
        cells = [np.arange(side + 1) * width] * 2
    places, weights = (jnp.concatenate(x, 1) for x in zip(*parts, strict=True))
    return Patches(
        places.reshape(*batch, heads, *places.shape[1:]),
        weights.reshape(*batch, heads, *weights.shape[1:]),
    )


def _finer(width: int) -> int:
    """Computes the positions of a bin at the next level: a power of two."""
    return 2 ** max(0, math.ceil(math.log2(width / _FACTOR)))


def _shares(edges, regions, size) -> np.ndarray:
    """Computes the share of each cell in each region, `[regions, cells]`."""
    start = np.maximum(edges[:-1], regions[:, None])
    stop = np.minimum(edges[1:], regions[:, None] + size)
    return (np.maximum(stop - start, 0) / np.diff(edges)).astype(np.float32)


def _of_places(attention_map, starts, width, side) -> Array:
    """Cuts parts of one width, `[B... x H, n, R, R]`, at `starts` `[.., n, 2]`."""
    *batch, heads, num_queries, num_keys = attention_map.shape
    flat, count = starts.shape[:2]
    # Queries of some bins at once, so that tiles stay small.
    bins = max(1, min(side, _TILE // (side * width * width)))

    def part(place):
        index, (first_query, first_key) = place
        *example, head = jnp.unravel_index(index, (*batch, heads))
        own = attention_map.head(head, *example)
        columns = first_key + jnp.arange(side * width)

        def of_bin(first):
            rows = first + jnp.arange(width)
            weights = own.tile(
                jnp.minimum(rows, num_queries - 1), jnp.minimum(columns, num_keys - 1)
            )[0]
            sees = own.sees[0, jnp.minimum(rows, num_queries - 1)]
            sees &= rows < num_queries
            seen = sees[:, None] & (columns < num_keys)[None]
            weights = jnp.where(seen, weights, 0)
            mass = weights.sum(0).reshape(side, width).sum(-1)
            return mass / jnp.maximum(sees.sum(), 1)

        firsts = first_query + jnp.arange(side) * width
        return lax.map(of_bin, firsts, batch_size=bins)

    indices = jnp.repeat(jnp.arange(flat), count)
    weights = lax.map(part, (indices, starts.reshape(-1, 2)))
    return weights.reshape(flat, count, side, side)
