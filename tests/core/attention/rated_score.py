"""A score with a parameter per head, as a user writes one."""

import jax
import jax.numpy as jnp

from mha_haiku.core import tiles
from mha_haiku.core.attention import Score, dot_product


@tiles.pytree
class Rated(Score):
    """`rate * tanh(query . key / sqrt(K))`; rates are `[H]` or `[B..., H]`."""

    rate: jax.Array = tiles.array("H")

    def __call__(self, query, key):
        rate = self.aligned(query.ndim - 3).rate[..., None, None]
        return rate * jnp.tanh(dot_product()(query, key))

    def check(self, num_heads, key_size):
        wanted = (*self.rate.shape[:-1], num_heads)
        tiles.check_axes("rate", self.rate, wanted, "[H]")
