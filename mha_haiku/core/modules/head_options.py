"""What attention may learn beside its projections: sinks, gates and smeared keys.

Scores are in `score_kinds.py`. `B...` batch axes, T query positions, S key positions, H
query heads, G key heads, V value size per head, D model width.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku.core import attention

Array = jax.Array


def learned_sinks(num_heads: int) -> attention.Normalizer:
    """Returns softmax with a sink per head, whose logits "sinks" `[H]` start at 0.

    Source: OpenAI 2025 (gpt-oss), https://arxiv.org/abs/2508.10925.
    """
    return attention.sink(hk.get_parameter("sinks", (num_heads,), init=jnp.zeros))


def head_gates(query: Array, num_heads: int, value_size: int) -> Array:
    """Returns a gate in [0, 1] per position and head: `[B..., T, H, 1]`.

    It is the sigmoid of a linear map without bias, named "head_gate", of the query's
    input `[B..., T, D]`.

    Source: Qiu et al. 2025, section 2.2 (headwise), https://arxiv.org/abs/2505.06708.
    """
    del value_size
    return _gates(query, num_heads, 1)


def channel_gates(query: Array, num_heads: int, value_size: int) -> Array:
    """Returns the same per position, head and channel, `[B..., T, H, V]`.

    Arguments and source as for `head_gates` (there "elementwise").
    """
    return _gates(query, num_heads, value_size)


def _gates(query, num_heads, size):
    linear = hk.Linear(num_heads * size, with_bias=False, name="head_gate")
    gates = jax.nn.sigmoid(linear(query))
    return gates.reshape(*query.shape[:-1], num_heads, size)


def smeared_keys(key: Array) -> Array:
    """Returns each key `[B..., S, G, K]` mixed with the one before it.

    Position s gets `a k[s] + (1 - a) k[s - 1]`, the first keeps its own; `a` is the
    sigmoid of a parameter "smear" `[G]`, which starts at 0.

    Source: Olsson et al. 2022, argument 2, https://arxiv.org/abs/2209.11895.
    """
    logits = hk.get_parameter("smear", key.shape[-2:-1], key.dtype, init=jnp.zeros)
    own = jax.nn.sigmoid(logits).reshape(*(1,) * (key.ndim - 2), -1, 1)
    before = jnp.concatenate([key[..., :1, :, :], key[..., :-1, :, :]], axis=-3)
    return own * key + (1 - own) * before
