"""Roll-out: how much of each input reaches a position through all layers.

`B...` batch axes, T positions, H heads, V value size, D model width, R chosen rows, L
layers. R vectors go down through the layers, tile by tile, and no `[T, T]` array is
made: memory is `O(H R T)` at any length.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mha_haiku import attention, checks
from mha_haiku.heads import layer_chain

Array = jax.Array
Maps = Sequence[attention.AttentionMap]


def rollout(
    maps: Maps,
    rows: layer_chain.Rows,
    *,
    residual: float = 0.5,
    per_layer: bool = False,
) -> Array:
    """Returns attention roll-out: rows of the product of the layers' mean attention.

    A layer's matrix is `residual I + (1 - residual) A`, with A the mean of its heads. A
    row is that of I where the query is fully masked in all heads (padding), and in a
    layer without heads (all pruned); a head where the query is fully masked is left out
    of the mean. So rows sum to 1; where those of maps do not, as with sinks, A is the
    sum over heads divided by what its rows sum to. `rollout(maps[i : i + 1], rows,
    residual=0)` is the mean attention of layer i, except for such rows.

    Args:
      maps: One per layer, of shape (B..., H, T, T); H may differ.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      residual: Share of the residual connection, in [0, 1).
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, the share of each input in each row; with `per_layer` `[L, B...,
      R, T]`, entry l being the roll-out through layers 0 to l.

    Raises:
      ValueError: If maps are not of self-attention, or a row is outside of them.

    Source: Abnar and Zuidema 2020, eq. 1, https://arxiv.org/abs/2005.00928.
    """
    start = layer_chain.start_of(maps, rows)
    checks.fraction("residual", residual)
    layers = [
        functools.partial(layer_chain.mixed, layer, None, residual) for layer in maps
    ]
    return layer_chain.chained(layers, start, per_layer=per_layer)


def rollout_dense(maps: Maps, *, residual: float = 0.5) -> Array:
    """Returns all rows of `rollout` as a product of whole matrices, `[B..., T, T]`.

    Args:
      maps: One per layer, of shape (B..., H, T, T).
      residual: Share of the residual connection, in [0, 1).

    Raises:
      ValueError: If maps are not of self-attention.
    """
    layer_chain.check_maps(maps)
    checks.fraction("residual", residual)
    return functools.reduce(
        lambda below, layer: layer_chain.matrix(layer, residual) @ below,
        maps[1:],
        layer_chain.matrix(maps[0], residual),
    )


def value_rollout(
    maps: Maps,
    rows: layer_chain.Rows,
    *,
    output_weights: Sequence[Array] | None = None,
    residual: float = 0.5,
    per_layer: bool = False,
) -> Array:
    """Returns the roll-out of attention weighted by the norms of the values.

    Head h's weight `a[t, s]` is replaced by `a[t, s] |v_s W_h|`, the norm of what the
    head adds to t from s; the sum over heads is divided by its sum over s. Norms are
    added per head, so that heads which cancel each other count in full.

    Args:
      maps: One per layer, of shape (B..., H, T, T), with values.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      output_weights: Per layer `[H, V, D]`, the output projection W of each head; None:
        the norms are those of the values themselves.
      residual: Share of the residual connection, in [0, 1).
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      As `rollout` does.

    Raises:
      ValueError: If maps are not of self-attention, have no values, or rows or weights
        do not fit.

    Source: Kobayashi et al. 2020, eq. 4 and 8, https://arxiv.org/abs/2004.10102.
    """
    start = layer_chain.start_of(maps, rows)
    checks.fraction("residual", residual)
    layer_chain.check_per_layer("output_weights", output_weights, maps)
    output_weights = output_weights or [None] * len(maps)
    layers = [
        functools.partial(layer_chain.mixed, layer, _sizes(layer, weights), residual)
        for layer, weights in zip(maps, output_weights, strict=True)
    ]
    return layer_chain.chained(layers, start, per_layer=per_layer)


def _sizes(attention_map, weights):
    """Returns the norms `[B..., S, H]` of the projected values."""
    if not attention_map.shape[-3]:
        return None
    values = layer_chain.values_of(attention_map)
    if weights is not None:
        shape, wanted = jnp.shape(weights), values.shape[-2:]
        if len(shape) != 3 or shape[:2] != wanted:
            raise ValueError(
                "output_weights must be [H, V, D] of each layer, with H and V = "
                f"{wanted}, got shape {shape}."
            )
        # W^T = Q U with orthonormal columns in Q, so |v W| = |U v|: a norm of V numbers
        # in place of D.
        weights = jnp.asarray(weights, values.dtype)
        upper = jnp.linalg.qr(jnp.swapaxes(weights, -1, -2), mode="r")
        values = jnp.einsum("...shv,huv->...shu", values, upper)
    return jnp.linalg.norm(values, axis=-1)
