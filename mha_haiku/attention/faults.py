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

    def cleaned(
        self, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values with zeros for faulty vectors."""
        query = jnp.where(self.queries[..., None], 0, query)
        key, value = (jnp.where(self.keys[..., None], 0, x) for x in (key, value))
        return query, key, value


def found(query: Array, key: Array, value: Array) -> Faults:
    """Returns which vectors are not finite.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
    """
    query, key, value = (~jnp.isfinite(x).all(-1) for x in (query, key, value))
    return Faults(query, key | value)
