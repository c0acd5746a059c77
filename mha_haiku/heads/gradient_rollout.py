"""Roll-out of attention weighted by the gradient of an answer.

`B...` batch axes, T query positions, S = T key positions, H heads, V value size per
head, R chosen rows, L layers. The gradient of an answer with respect to the attention
weight `a[t, s]` is the dot product of the gradient of the head's output at query t with
the value at key s, times the gates of t where attention is gated. So `[T, V]` and `[S,
V]` are kept, and the `[T, S]` gradient is made tile by tile, as the weights are.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku import attention, models, tasks
from mha_haiku.attention import fold
from mha_haiku.heads import edits, layer_chain, subject

Array = jax.Array

# From the logits of a batch and the batch itself to a number per example, `[B]`: the
# score of the answer to be explained, such as its logit.
Answer = Callable[[Array, tasks.Example], Array]


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
    output, heads = subject.look(model, params, example, ["*/heads"])

    def score(added):
        # Adds 0 to each head, so as to differentiate by it.
        moved = edits.on_parts(list(heads), added, jnp.add)
        edited = subject.run_edited(model, params, example, moved)
        return answer(edited.logits, example).sum()

    zeros = [jnp.zeros_like(each) for each in heads.values()]
    return output, tuple(jax.grad(score)(zeros))


def gradient_rollout(
    maps: Sequence[attention.AttentionMap],
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
      maps: One per layer, of shape (B..., H, T, T), with values.
      gradients: Per layer `[B..., T, H, V]`, from `output_gradients`; not read for a
        layer without heads.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, the share of each input in each row; with `per_layer` `[L, B...,
      R, T]`, entry l being the roll-out through layers 0 to l.

    Raises:
      ValueError: If maps are not of self-attention, have no values, or rows or
        gradients do not fit.

    Source: Chefer et al. 2021, eq. 5 and 6, https://arxiv.org/abs/2103.15679.
    """
    start = layer_chain.start_of(maps, rows)
    layer_chain.check_per_layer("gradients", gradients, maps)
    layers = [
        functools.partial(_gradient_weighted, layer, _checked(gradient, layer))
        for layer, gradient in zip(maps, gradients, strict=True)
    ]
    return layer_chain.chained(layers, start, per_layer=per_layer)


def _checked(gradient, attention_map):
    if not attention_map.shape[-3]:
        return None
    wanted = layer_chain.values_of(attention_map).shape  # S = T
    if jnp.shape(gradient) != wanted:
        raise ValueError(
            f"gradients must be [B..., T, H, V] of each layer, {wanted} here, got "
            f"shape {jnp.shape(gradient)}."
        )
    gradient = jnp.asarray(gradient, attention_map.dtype)
    gates = attention_map.gates
    return gradient if gates is None else gradient * gates.astype(gradient.dtype)


@dataclasses.dataclass(frozen=True)
class _GradientWeighted(fold.Observation):
    """The transposed map, with `max(a g, 0)` for the weight a, times columns `[T, R]`.

    Queries bring the gradients of the head's output `[T, V]` and the columns, keys the
    values `[S, V]`; gradients times values are g.
    """

    def nothing(self, num_queries, num_keys, given, dtype):
        _, columns = given.queries
        return fold.Sums(keys=jnp.zeros((num_keys, columns.shape[-1]), dtype))

    def add(self, tile, sums):
        output_gradients, columns = tile.given.queries
        gradients = output_gradients @ tile.given.keys.T
        weights = tile.weights * jnp.maximum(gradients, 0)
        return sums._replace(keys=sums.keys + weights.T @ columns)


def _gradient_weighted(attention_map, gradient, columns):
    """Returns `(I + A)^T` times columns `[B..., T, R]`; see `gradient_rollout`."""
    num_heads = attention_map.shape[-3]
    if not num_heads:
        return columns
    given = fold.Given(
        (gradient, columns[..., None, :]), layer_chain.values_of(attention_map)
    )
    received = attention_map.observe(_GradientWeighted(), given).keys
    return columns + received.sum(-3) / num_heads
