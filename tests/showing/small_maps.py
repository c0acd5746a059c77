"""Small maps of all-different sizes."""

import jax.numpy as jnp
import numpy as np

from mha_haiku import attention
from mha_haiku.core.modules import no_attention

B, T, S, H, K, V = 2, 4, 6, 5, 3, 7


def make_map(seed=0, *, batch=(B,), queries=T, keys=S, heads=H, mask=None, **options):
    """Returns a map of random queries and keys."""
    rng = np.random.default_rng(seed)

    def array(length, num_heads, size):
        values = rng.normal(size=(*batch, length, num_heads, size))
        return jnp.asarray(2 * values, jnp.float32)

    arrays = array(queries, heads, K), array(keys, heads, K), array(keys, heads, V)
    return attention.attend(*arrays, mask=mask, **options)[1]


def make_empty():
    """Returns the map of a layer whose heads are all pruned."""
    return no_attention.map_of_no_heads(
        jnp.zeros((B, T, 1)), jnp.zeros((B, S, 1)), None
    )
