"""NaN and inf in queries, keys and values, kept apart so that a mask can hide them.

In a matrix product a masked NaN is still felt, as 0 x NaN is NaN, forward and
backward. So products get finite arrays, and only the scores of the forward pass feel a
fault: it reaches just the queries that may attend to it, whose logsumexp tells of it
from then on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku import tiles

Array = jax.Array


class Faults(NamedTuple):
    """Which vectors were not finite.

    Attributes:
      queries: `[B..., T, H]` booleans.
      keys: `[B..., S, G]` booleans, of keys and their values.
    """

    queries: Array
    keys: Array

    def tile(self, rows: tiles.Index, columns: tiles.Index) -> Array:
        """Returns which pairs of R queries and C keys are faulty, `[B..., H, R, C]`."""
        queries = tiles.take(self.queries, rows, axis=-2)
        keys = tiles.take(self.keys, columns, axis=-2)
        keys = jnp.repeat(keys, queries.shape[-1] // keys.shape[-1], axis=-1)
        queries = jnp.moveaxis(queries, -1, -2)[..., :, None]
        return queries | jnp.moveaxis(keys, -1, -2)[..., None, :]

    def marked(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Returns queries and keys with NaN where there were faults."""
        return (
            jnp.where(self.queries[..., None], jnp.nan, query),
            jnp.where(self.keys[..., None], jnp.nan, key),
        )


def separated(
    query: Array, key: Array, value: Array
) -> tuple[Array, Array, Array, Faults]:
    """Returns queries, keys and values with zeros for faulty vectors, and the faults.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
    """
    query, faulty_queries = _finite(query)
    key, faulty_keys = _finite(key)
    value, faulty_values = _finite(value)
    return query, key, value, Faults(faulty_queries, faulty_keys | faulty_values)


def _finite(x: Array) -> tuple[Array, Array]:
    """Returns `[..., size]` with zeros for faulty vectors, and which are faulty."""
    faulty = ~jnp.isfinite(x).all(-1)
    return jnp.where(faulty[..., None], 0, x), faulty
