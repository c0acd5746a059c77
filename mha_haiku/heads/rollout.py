"""Roll-out: how much of each input reaches a position through all layers.

`B...` batch axes, T positions, H heads, V value size, D model width, R chosen rows, L
layers. R vectors go down through the layers, tile by tile, and no `[T, T]` array is
made: memory is `O(H R T)` at any length.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mha_haiku import attention, checks
from mha_haiku.attention import fold
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
    head adds to t from s (with `v_s` times t's gates where attention is gated); the sum
    over heads is divided by its sum over s. Norms are added per head, so that heads
    which cancel each other count in full.

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
        _by_sizes(layer, weights, residual)
        for layer, weights in zip(maps, output_weights, strict=True)
    ]
    return layer_chain.chained(layers, start, per_layer=per_layer)


def _by_sizes(attention_map, weights, residual) -> layer_chain.Layer:
    """Returns a layer of weights times the norms of what they move."""
    if not attention_map.shape[-3]:
        return functools.partial(layer_chain.mixed, attention_map, None, residual)
    values = layer_chain.values_of(attention_map)
    upper = None if weights is None else _upper(weights, values)
    gates = attention_map.gates
    if gates is not None and gates.shape[-1] > 1:  # another norm for each query
        if upper is None:
            upper = jnp.broadcast_to(
                jnp.eye(values.shape[-1]), (*values.shape[-2:], values.shape[-1])
            )
        parts = jnp.einsum("...shv,huv->...shvu", values, upper)
    else:
        if upper is not None:
            values = jnp.einsum("...shv,huv->...shu", values, upper)
        sizes = jnp.linalg.norm(values, axis=-1)
        if gates is None:
            return functools.partial(layer_chain.mixed, attention_map, sizes, residual)
        parts = sizes[..., None, None]

    def observed(columns):
        queries = gates.astype(values.dtype), columns[..., None, :]
        sums = attention_map.observe(_GatedSizes(), fold.Given(queries, parts))
        return jax.tree.map(lambda x: x.sum(len(values.shape) - 3), sums)

    totals = observed(jnp.zeros((*values.shape[:-2], 1), values.dtype)).queries
    gather = lambda columns: observed(columns).keys  # noqa: E731
    return functools.partial(layer_chain.normalized, totals, gather, residual)


def _upper(weights, values):
    """Returns U `[H, V, V]` or smaller, with `|v W| = |U v|`: V numbers instead of D.

    W^T = Q U with orthonormal columns in Q.
    """
    shape, wanted = jnp.shape(weights), values.shape[-2:]
    if len(shape) != 3 or shape[:2] != wanted:
        raise ValueError(
            "output_weights must be [H, V, D] of each layer, with H and V = "
            f"{wanted}, got shape {shape}."
        )
    weights = jnp.asarray(weights, values.dtype)
    return jnp.linalg.qr(jnp.swapaxes(weights, -1, -2), mode="r")


@dataclasses.dataclass(frozen=True)
class _GatedSizes(fold.Observation):
    """Weights times the norms of gated values: sums of rows, and transposed products.

    Queries bring their gates `[T, V]` and columns `[T, R]`. Keys bring `[S, V, U]`, the
    part of their U projected numbers that each of the V values makes.
    """

    def nothing(self, num_queries, num_keys, given, dtype):
        _, columns = given.queries
        keys = jnp.zeros((num_keys, columns.shape[-1]), dtype)
        return fold.Sums(jnp.zeros(num_queries, dtype), keys)

    def add(self, tile, sums):
        gates, columns = tile.given.queries

        def square(total, part):  # one of U at a time: no [R, C, U] is held
            return total + jnp.square(gates @ part.T), None

        nothing = jnp.zeros_like(tile.weights)
        squares, _ = jax.lax.scan(square, nothing, jnp.moveaxis(tile.given.keys, -1, 0))
        moved = tile.weights * jnp.sqrt(squares)
        return sums._replace(
            queries=sums.queries + moved.sum(-1), keys=sums.keys + moved.T @ columns
        )
