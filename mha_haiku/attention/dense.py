"""Attention by the whole matrix of scores: the fastest for short sequences.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads, K
query/key size and V value size per head.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import masks, positions
from mha_haiku.attention import attention_map, scores

Array = jax.Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: masks.Mask,
    bias: positions.ScoreBias | None,
    score: scores.Score,
    dropout_rate: float,
    rng: Array | None,
) -> tuple[Array, Array]:
    """Returns the attended values and the logsumexp of each row of scores.

    Args:
      query: `[B..., T, H, K]`.
      key: `[B..., S, G, K]`.
      value: `[B..., S, G, V]`.
      mask: Which query may attend to which key.
      bias: What is added to the scores, or None.
      score: The score.
      dropout_rate: Share of the weights set to zero, in [0, 1).
      rng: The key of the dropout; None without.

    Returns:
      Values `[B..., T, H, V]` of `value`'s dtype, and the logsumexp `[B..., H, T]`,
      float32 or float64. A row whose keys are all masked gives 0 and -inf.
    """
    rows, columns = np.arange(query.shape[-3]), np.arange(key.shape[-3])
    tile = attention_map.masked_scores(query, key, mask, bias, score, rows, columns)
    largest = jnp.max(tile, axis=-1, keepdims=True, initial=-jnp.inf)
    hides = not isinstance(mask, masks.Full)
    if hides:
        # A row of NaN is blind until the end: in its gradient, 0 x NaN would be felt by
        # keys of rows that may not attend to the fault.
        faulty = jnp.isnan(largest)
        tile, largest = (jnp.where(faulty, -jnp.inf, x) for x in (tile, largest))
    kept = None
    if dropout_rate:
        kept = jax.random.bernoulli(rng, 1 - dropout_rate, tile.shape)
        kept = kept.astype(tile.dtype) / (1 - dropout_rate)
    values, logsumexp = _softmax_times(tile, largest, value, kept)
    if hides:
        values = jnp.where(faulty, jnp.nan, values)
        logsumexp = jnp.where(faulty[..., 0], jnp.nan, logsumexp)
    return jnp.moveaxis(values, -3, -2).astype(value.dtype), logsumexp


@jax.custom_jvp
def _softmax_times(
    tile: Array, largest: Array, value: Array, kept: Array | None
) -> tuple[Array, Array]:
    """Returns `(softmax(tile) * kept) value`, and the logsumexp.

    The sums are divided, not the weights: T V numbers in place of T S. The derivative
    is that of divided weights, as the gradient of the division is slow on the CPU.

    Args:
      tile: `[B..., H, T, S]` scores, -inf where masked.
      largest: `[B..., H, T, 1]`, the largest score of each row.
      value: `[B..., S, G, V]`.
      kept: `[B..., H, T, S]`, what each weight is multiplied by; None: by 1.

    Returns:
      `[B..., H, T, V]` and `[B..., H, T]`.
    """
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(tile - largest)
    total = weights.sum(-1, keepdims=True)
    blind = total == 0
    total = jnp.where(blind, 1, total)
    logsumexp = jnp.where(blind, -jnp.inf, largest + jnp.log(total))[..., 0]
    weights = weights if kept is None else weights * kept
    return _weighted_sum(weights, value) / total, logsumexp


@_softmax_times.defjvp
def _softmax_times_jvp(primals, tangents):
    tile, _, value, kept = primals
    tile_tangent, _, value_tangent, _ = tangents
    values, logsumexp = _softmax_times(*primals)
    blind = logsumexp == -jnp.inf
    weights = jnp.exp(tile - jnp.where(blind, jnp.inf, logsumexp)[..., None])
    change = weights * tile_tangent
    logsumexp_tangent = change.sum(-1)
    change = change - weights * logsumexp_tangent[..., None]
    if kept is not None:
        weights, change = weights * kept, change * kept
    values_tangent = _weighted_sum(change, value) + _weighted_sum(
        weights, value_tangent
    )
    return (values, logsumexp), (values_tangent, logsumexp_tangent)


def _weighted_sum(weights: Array, value: Array) -> Array:
    """Returns `[B..., H, T, V]` from `[B..., H, T, S]` and `[B..., S, G, V]`."""
    num_heads, num_value_heads = weights.shape[-3], value.shape[-2]
    heads = num_value_heads, num_heads // num_value_heads
    grouped = weights.astype(value.dtype).reshape(
        *weights.shape[:-3], *heads, *weights.shape[-2:]
    )
    values = jnp.einsum(
        "...grts,...gsv->...grtv",
        grouped,
        jnp.moveaxis(value, -2, -3),
        preferred_element_type=weights.dtype,
    )
    return values.reshape(*values.shape[:-4], num_heads, *values.shape[-2:])
