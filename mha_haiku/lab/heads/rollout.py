"""Roll-out: how much of each input reaches a position through all layers.

`B...` batch axes, T query positions, S = T key positions, H heads, V value size per
head, D model width, R chosen rows, L layers. R vectors go down through the layers, tile
by tile, and no `[T, T]` array is made: memory is `O(H R T)` at any length.

The gradient of an answer with respect to the attention weight `a[t, s]` is the dot
product of the gradient of the head's output at query t with the value at key s, times
the gates of t where attention is gated. So `[T, V]` and `[S, V]` are kept, and the
`[T, S]` gradient is made tile by tile, as the weights are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import attention, checks, models
from mha_haiku.core.attention import observation
from mha_haiku.lab.heads import edits, layer_chain, running
from mha_haiku.training import tasks

Array = jax.Array
Maps = Sequence[attention.AttentionMap]

# From the logits of a batch and the batch itself to a number per example, `[B]`: the
# score of the answer to be explained, such as its logit.
Answer = Callable[[Array, tasks.Example], Array]


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
      rows: Which of the T positions of the last layer, `slice(None)` for all; see
        `layer_chain.positions_of`.
      residual: Share of the residual connection, in [0, 1).
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, the share of each input in each row; with `per_layer` `[L, B...,
      R, T]`, entry l being the roll-out through layers 0 to l.

    Raises:
      ValueError: If maps are not of self-attention, or a row is outside of them.

    Source: Abnar and Zuidema 2020, eq. 1, https://arxiv.org/abs/2005.00928.
    """
    checks.fraction("residual", residual)

    def layer(attention_map, _, columns):
        return _mixed(attention_map, None, residual, columns)

    return layer_chain.chained(layer, maps, rows, per_layer=per_layer)


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
      maps: As in `rollout`, with values.
      rows: As in `rollout`, like the rest.
      output_weights: Per layer `[H, V, D]`, the output projection W of each head; None:
        the norms are those of the values themselves.
      residual: Share of the residual connection.
      per_layer: Whether to return the roll-outs up to each layer too.

    Returns:
      As `rollout` does.

    Raises:
      ValueError: If maps are not of self-attention, have no values, or rows or weights
        do not fit.

    Source: Kobayashi et al. 2020, eq. 4 and 8, https://arxiv.org/abs/2004.10102.
    """
    checks.fraction("residual", residual)

    def layer(attention_map, weights, columns):
        return _by_sizes(attention_map, weights, residual, columns)

    return layer_chain.chained(
        layer, maps, rows, per_layer=per_layer, output_weights=output_weights
    )


def gradient_rollout(
    maps: Maps,
    gradients: Sequence[Array],
    rows: layer_chain.Rows,
    *,
    per_layer: bool = False,
) -> Array:
    """Returns the roll-out of attention weighted by the gradient of an answer.

    A layer's matrix is `I + A`, with A the mean over heads of `max(a g, 0)`, where g is
    the gradient of the answer with respect to the weight a. Rows do not sum to 1. Needs
    `O(H R T)` memory and one tile.

    Args:
      maps: As in `rollout`, with values.
      gradients: Per layer `[B..., T, H, V]`, from `output_gradients`; not read for a
        layer without heads.
      rows: As in `rollout`.
      per_layer: Whether to return the roll-outs up to each layer too.

    Returns:
      As `rollout` does.

    Raises:
      ValueError: If maps are not of self-attention, have no values, or rows or
        gradients do not fit.

    Source: Chefer et al. 2021, eq. 5 and 6, https://arxiv.org/abs/2103.15679.
    """
    return layer_chain.chained(
        _by_gradients, maps, rows, per_layer=per_layer, gradients=gradients
    )


def output_gradients(
    model: models.Model, params: Any, example: tasks.Example, answer: Answer
) -> tuple[models.Output, tuple[Array, ...]]:
    """Returns the model's output and the answer's gradients of the heads' outputs.

    One backward pass, for all layers. Meant to be called under jit.

    Args:
      model: The model.
      params: Its parameters.
      example: The batch.
      answer: What is differentiated; the number of an example may depend on the
        logits of that example only.

    Returns:
      The output on the batch, and for each layer `[B, T, H, V]`, for
      `gradient_rollout`; `[B, T, 0, V]` for one without heads.
    """
    output, heads = running.look(model, params, example, ["*/heads"])

    def score(added):
        # Adds 0 to each head, so as to differentiate by it.
        moved = edits.on_parts(list(heads), added, jnp.add)
        edited = running.run_edited(model, params, example, moved)
        return answer(edited.logits, example).sum()

    zeros = [jnp.zeros_like(each) for each in heads.values()]
    return output, tuple(jax.grad(score)(zeros))


def _mixed(attention_map, sizes, residual, columns) -> Array:
    """Returns the transposed matrix of weights times sizes, times columns.

    Args:
      attention_map: The map of the layer.
      sizes: `[B..., S, H]`; None: all are 1.
      residual: Share of the residual connection.
      columns: `[B..., T, R]`.
    """
    if sizes is not None:
        totals = attention_map.apply(sizes[..., None]).sum((-1, -2))
    elif attention_map.rows_sum_to != "1":
        totals = attention_map.row_sums().sum(-2)
    else:  # known without a pass: a head's row sums to 1, or 0 if masked
        sees = attention_map.logsumexp != -jnp.inf
        totals = sees.sum(-2, dtype=attention_map.dtype)

    def gather(columns):
        received = attention_map.apply_transposed(columns[..., None, :])
        if sizes is not None:
            received = received * sizes[..., None]
        return received.sum(-2)

    return layer_chain.mixed(totals, gather, residual, columns)


def _by_sizes(attention_map, weights, residual, columns) -> Array:
    """Returns what `_mixed` does, for the norms of what weights move."""
    values = layer_chain.values_of(attention_map)
    upper, gates = _upper(weights, values), attention_map.weighting.gates
    if gates is not None and gates.shape[-1] > 1:  # another norm for each query
        parts = jnp.einsum("...shv,huv->...shvu", values, upper)
    else:
        written = jnp.einsum("...shv,huv->...shu", values, upper)
        sizes = jnp.linalg.norm(written, axis=-1)
        if gates is None:
            return _mixed(attention_map, sizes, residual, columns)
        parts = sizes[..., None, None]

    def observed(columns):
        queries = gates.astype(values.dtype), columns[..., None, :]
        sums = attention_map.observe(_GatedSizes(), observation.Given(queries, parts))
        return jax.tree.map(lambda x: x.sum(len(values.shape) - 3), sums)

    totals = observed(columns[..., :1]).queries
    gather = lambda columns: observed(columns).keys  # noqa: E731
    return layer_chain.mixed(totals, gather, residual, columns)


def _by_gradients(attention_map, gradient, columns) -> Array:
    """Returns `(I + A)^T` times columns `[B..., T, R]`; see `gradient_rollout`."""
    values = layer_chain.values_of(attention_map)
    if jnp.shape(gradient) != values.shape:  # S = T
        raise ValueError(
            "gradients must be [B..., T, H, V] of each layer, "
            f"{values.shape} here, got shape {jnp.shape(gradient)}."
        )
    gradient = jnp.asarray(gradient, attention_map.dtype)
    if attention_map.weighting.gates is not None:
        gradient = gradient * attention_map.weighting.gates.astype(gradient.dtype)
    given = observation.Given((gradient, columns[..., None, :]), values)
    received = attention_map.observe(_GradientWeighted(), given).keys
    return columns + received.sum(-3) / attention_map.shape[-3]


def _upper(weights, values):
    """Returns U `[H, V, V]` or smaller, with `|v W| = |U v|`: V numbers instead of D.

    W^T = Q U with orthonormal columns in Q. Without weights U is the identity.
    """
    if weights is None:
        *_, num_heads, size = values.shape
        return jnp.broadcast_to(jnp.eye(size), (num_heads, size, size))
    shape, wanted = jnp.shape(weights), values.shape[-2:]
    if len(shape) != 3 or shape[:2] != wanted:
        raise ValueError(
            "output_weights must be [H, V, D] of each layer, with H and V = "
            f"{wanted}, got shape {shape}."
        )
    weights = jnp.asarray(weights, values.dtype)
    return jnp.linalg.qr(jnp.swapaxes(weights, -1, -2), mode="r")


@dataclasses.dataclass(frozen=True)
class _GatedSizes(observation.Observation):
    """Weights times the norms of gated values: sums of rows, and transposed products.

    Queries bring their gates `[T, V]` and columns `[T, R]`. Keys bring `[S, V, U]`, the
    part of their U projected numbers that each of the V values makes.
    """

    def nothing(self, num_queries, num_keys, given, dtype):
        _, columns = given.queries
        keys = jnp.zeros((num_keys, columns.shape[-1]), dtype)
        return observation.Sums(jnp.zeros(num_queries, dtype), keys)

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


@dataclasses.dataclass(frozen=True)
class _GradientWeighted(observation.Observation):
    """The transposed map, with `max(a g, 0)` for the weight a, times columns `[T, R]`.

    Queries bring the gradients of the head's output `[T, V]` and the columns, keys the
    values `[S, V]`; gradients times values are g.
    """

    def nothing(self, num_queries, num_keys, given, dtype):
        _, columns = given.queries
        return observation.Sums(keys=jnp.zeros((num_keys, columns.shape[-1]), dtype))

    def add(self, tile, sums):
        output_gradients, columns = tile.given.queries
        gradients = output_gradients @ tile.given.keys.T
        weights = tile.weights * jnp.maximum(gradients, 0)
        return sums._replace(keys=sums.keys + weights.T @ columns)
