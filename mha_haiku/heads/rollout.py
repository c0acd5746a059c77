"""Roll-out: how much of each input reaches a position through all layers.

`B...` batch axes, T positions, H heads, V value size, D model width, R chosen rows, L
layers. A roll-out goes down through the layers as R vectors, tile by tile, and makes no
`[T, T]` array: it takes `O(H R T)` memory, at any length.
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
    position is passed on whole where no head sees anything (padding), and by a layer
    without heads (all pruned); where some heads see nothing A is the mean of the rest.
    So rows sum to 1. `rollout(maps[i : i + 1], rows, residual=0)` is the raw attention
    of layer i, but for those positions.

    Args:
      maps: One per layer, of shape (B..., H, T, T); H may differ.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      residual: Share of the residual connection, in [0, 1).
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, what each row has of each input; with `per_layer` `[L, B..., R,
      T]`, at place l with layer l as the last.

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
    """Returns the roll-out of attention weighted by the sizes of what it moves.

    In place of head h's weight `a[t, s]` stands `a[t, s] |v_s W_h|`, the size of what
    the head writes at t from s; the sum over heads is divided by its sum over s. Sizes
    are added up head by head, so that heads which undo each other count in full.

    Args:
      maps: One per layer, of shape (B..., H, T, T), with values.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      output_weights: Per layer `[H, V, D]`, what projects the outputs of each head;
        None: sizes are those of the values themselves.
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
    """Returns the sizes `[B..., S, H]` of the values, as they are projected."""
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
        # W^T = Q U, and Q keeps sizes: |v W| = |U v|, of V numbers in place of D.
        weights = jnp.asarray(weights, values.dtype)
        upper = jnp.linalg.qr(jnp.swapaxes(weights, -1, -2), mode="r")
        values = jnp.einsum("...shv,huv->...shu", values, upper)
    return jnp.linalg.norm(values, axis=-1)
