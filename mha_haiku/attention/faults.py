"""NaN and inf in queries, keys and values, moved to where a mask can hide them.

In a matrix product a masked NaN is still felt, as 0 x NaN is NaN, forward and backward.
Here the arrays are made finite, and the fault becomes a score of NaN: it reaches just
the queries that may attend to it.
"""

import jax
import jax.numpy as jnp

from mha_haiku import positions, tiles

Array = jax.Array


@tiles.pytree(data=("faulty_queries", "faulty_keys", "bias"))
class FaultBias(positions.ScoreBias):
    """A bias of NaN for faulty queries and keys, beside another bias.

    Attributes:
      faulty_queries: `[B..., T, H]` booleans.
      faulty_keys: `[B..., S, G]` booleans, of keys and their values.
      bias: The other bias, or None.
    """

    faulty_queries: Array
    faulty_keys: Array
    bias: positions.ScoreBias | None

    def check(self, *sizes):
        """Checks nothing: it was made from the queries and keys themselves."""

    def aligned_tile(self, rows, columns, batch_ndim):
        queries = tiles.take(self.faulty_queries, rows, axis=-2)
        keys = tiles.take(self.faulty_keys, columns, axis=-2)
        keys = jnp.repeat(keys, queries.shape[-1] // keys.shape[-1], axis=-1)
        queries = jnp.where(jnp.moveaxis(queries, -1, -2), jnp.nan, 0.0)[..., None]
        keys = jnp.where(jnp.moveaxis(keys, -1, -2), jnp.nan, 0.0)[..., None, :]
        if self.bias is None:
            return queries + keys
        return queries + keys + self.bias.aligned_tile(rows, columns, batch_ndim)


def moved_to_bias(
    query: Array, key: Array, value: Array, bias: positions.ScoreBias | None
) -> tuple[Array, Array, Array, FaultBias]:
    """Returns finite queries, keys and values, and a bias that marks the others.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
      bias: What else is added to the scores, or None.
    """
    query, faulty_queries = _finite(query)
    key, faulty_keys = _finite(key)
    value, faulty_values = _finite(value)
    faults = FaultBias(faulty_queries, faulty_keys | faulty_values, bias)
    return query, key, value, faults


def _finite(x: Array) -> tuple[Array, Array]:
    """Returns `[..., size]` with zeros for faulty vectors, and which are faulty."""
    faulty = ~jnp.isfinite(x).all(-1)
    return jnp.where(faulty[..., None], 0, x), faulty
