"""The three products that attention and its gradient consist of.

Axes are moved before the products, and sums over queries take the small operand first:
what XLA chooses by itself is slower on the CPU.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def pair(
    query: Float[Array, "*B T H K"], key: Float[Array, "*B S G K"]
) -> Float[Array, "*B H T S"]:
    """Computes the dot products of all queries and keys, float32 or float64."""
    products = jnp.einsum(
        "...grtk,...gsk->...grts",
        _grouped_rows(query, key.shape[-2]),
        jnp.moveaxis(key, -2, -3),
        preferred_element_type=accumulation_dtype(query.dtype),
    )
    return _merged(products)


def mix(
    weights: Float[Array, "*B H T S"], value: Float[Array, "*B S G V"]
) -> Float[Array, "*B T H V"]:
    """Averages values, float32 or float64; weights are rounded to the values' dtype."""
    mixed = jnp.einsum(
        "...grts,...gsv->...grtv",
        _grouped_weights(weights.astype(value.dtype), value.shape[-2]),
        jnp.moveaxis(value, -2, -3),
        preferred_element_type=accumulation_dtype(value.dtype),
    )
    return jnp.moveaxis(_merged(mixed), -3, -2)


def mix_transposed(
    weights: Float[Array, "*B H T S"],
    rows: Float[Array, "*B T H V"],
    num_key_heads: int,
) -> Float[Array, "*B S G V"]:
    """Sums over queries what each key receives: `mix`, transposed."""
    received = jnp.einsum(
        "...grtv,...grts->...gvs",
        _grouped_rows(rows, num_key_heads),
        _grouped_weights(weights.astype(rows.dtype), num_key_heads),
        preferred_element_type=accumulation_dtype(rows.dtype),
    )
    return jnp.moveaxis(received, -1, -3)


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of scores and softmax: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def _grouped_rows(rows: Array, num_key_heads: int) -> Array:
    """Groups rows by key head, `[..., T, H, K]` to `[..., G, H / G, T, K]`."""
    return _grouped_weights(jnp.moveaxis(rows, -2, -3), num_key_heads)


def _grouped_weights(weights: Array, num_key_heads: int) -> Array:
    """Groups weights by key head, `[..., H, T, S]` to `[..., G, H / G, T, S]`."""
    # A layer whose heads are all pruned has a map of no heads.
    heads = num_key_heads, weights.shape[-3] // max(num_key_heads, 1)
    return weights.reshape(*weights.shape[:-3], *heads, *weights.shape[-2:])


def _merged(grouped: Array) -> Array:
    """Merges the groups, `[..., G, H / G, T, S]` to `[..., H, T, S]`."""
    num_heads = grouped.shape[-4] * grouped.shape[-3]
    return grouped.reshape(*grouped.shape[:-4], num_heads, *grouped.shape[-2:])
