"""Dropout of weights, the same whatever tiles they are computed in.

R of T query positions, C of S key positions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mha_haiku.core import tiles

Array = jax.Array


def factors(
    rng: Array, rate: float, head: Array, rows: tiles.Index, columns: tiles.Index
) -> Float[Array, "R C"]:
    """Draws the factor of each weight of a tile: 0 or 1 / (1 - rate).

    Each weight has its PRNG key, folded from its head (counted over all examples),
    row and column, so that the same weights are dropped whatever tiles they are
    computed in.
    """
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)  # a raw one, as `hk.next_rng_key` gives it
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(rng, head), tiles.as_array(rows)
    )
    fold_columns = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(fold_columns, (0, None))(row_keys, tiles.as_array(columns))
    # A folded key is a hash already: its first word serves as the random bits.
    bits = jax.random.key_data(keys)[..., 0]
    is_kept = bits >= jnp.uint32(round(rate * 2**32))
    return is_kept.astype(jnp.float32) / (1 - rate)
