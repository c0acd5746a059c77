"""What is computed from a whole mask, block by block of its queries.

`B...` batch axes, T query positions, R of them in a block, S key positions, H heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles

Array = jax.Array
_BLOCK = 1024  # queries that are looked at together


def reduced(
    mask: Any,
    num_queries: int,
    num_keys: int,
    origin: tiles.Origin,
    function: Callable[[Array], Array],
) -> Array:
    """Returns a function of the tiles `[..., R, S]` of an aligned mask, stacked.

    The last block of queries repeats the last query.
    """
    columns = origin.columns(jnp.arange(num_keys))

    def of_block(rows):
        rows = origin.rows(rows)
        tile = mask.aligned_tile(rows, columns)
        return function(jnp.broadcast_to(tile, (*tile.shape[:-2], len(rows), num_keys)))

    if num_queries <= _BLOCK:
        return of_block(jnp.arange(num_queries))[None]
    count = -(-num_queries // _BLOCK)
    queries = jnp.minimum(jnp.arange(count * _BLOCK), num_queries - 1)
    return lax.map(of_block, queries.reshape(count, _BLOCK))


def rows(
    mask: Any,
    num_queries: int,
    num_keys: int,
    origin: tiles.Origin,
    function: Callable[[Array], Array],
) -> Array:
    """Returns what a function `[..., R]` of tiles says of each query, `[..., T]`."""
    stacked = reduced(mask, num_queries, num_keys, origin, function)
    joined = jnp.moveaxis(stacked, 0, -2)
    return lax.collapse(joined, joined.ndim - 2)[..., :num_queries]
