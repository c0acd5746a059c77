"""What an attention learns of its scores besides its projections.

`B...` batch axes, S key positions, H query heads, G key heads, K query/key size.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku import attention

Array = jax.Array


def additive_score(num_heads: int, key_size: int) -> attention.Score:
    """Returns an additive score with a learned weight `[H, K]` named "score"."""
    w_init = hk.initializers.VarianceScaling(1.0, "fan_in", "uniform", fan_in_axes=(1,))
    weight = hk.get_parameter("score", (num_heads, key_size), init=w_init)
    return attention.additive(weight)


def smeared_keys(key: Array) -> Array:
    """Returns each key mixed with the one before it, by a learned share per head.

    Position s gets `a k[s] + (1 - a) k[s - 1]`, the first keeps its own; `a` is the
    sigmoid of a parameter "smear" `[G]`, which starts at 0.

    Args:
      key: `[B..., S, G, K]`.

    Source: Olsson et al. 2022, argument 2, https://arxiv.org/abs/2209.11895.
    """
    logits = hk.get_parameter("smear", key.shape[-2:-1], key.dtype, init=jnp.zeros)
    own = jax.nn.sigmoid(logits).reshape(*(1,) * (key.ndim - 2), -1, 1)
    before = jnp.concatenate([key[..., :1, :, :], key[..., :-1, :, :]], axis=-3)
    return own * key + (1 - own) * before
