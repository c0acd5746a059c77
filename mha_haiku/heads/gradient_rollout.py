"""Roll-out of attention weighted by what an answer depends on.

`B...` batch axes, T query positions, S = T key positions, H heads, V value size per
head, R chosen rows, L layers. The derivative of an answer with respect to a weight is
the product of that with respect to the head's output at the query and of the value at
the key. So it is kept factored, as the weights themselves are, and made tile by tile.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku import attention, models, tasks
from mha_haiku.heads import layer_chain, subject

Array = jax.Array

# From the logits of a batch and the batch itself to a number per example, `[B]`: the
# score of the answer to be explained, such as its logit.
Answer = Callable[[Array, tasks.Example], Array]

_TILE = 512  # rows and columns, at most, of a tile
_TILE_WEIGHTS = 2**22  # and weights in it, of all examples and heads


def output_gradients(
    model: models.Model, params: Any, example: tasks.Example, answer: Answer
) -> tuple[models.Output, tuple[Array, ...]]:
    """Returns the model's output and the answer's derivatives by the heads' outputs.

    What runs above the outputs of layer l runs once more for it, L (L + 1) / 2 layers
    in all. Under jit.

    Args:
      model: The model; its layers must not be scanned.
      params: Its parameters.
      example: The batch.
      answer: What is differentiated; of each example by its own outputs alone.

    Returns:
      The output on the batch, and for each layer `[B, T, H, V]`, for
      `gradient_rollout`; `[B, T, 0, 0]` for one without heads.

    Raises:
      ValueError: If layers are scanned, or maps have no values.
    """
    output = subject.run(model, params, example)
    num_layers = len(output.maps)

    def of_layer(i):
        def score(outputs):
            # All heads of the layer are closed, and pass on what they would have said:
            # so it is an argument, and nothing changes.
            gates = _at(i, jnp.zeros(outputs.shape[-2], outputs.dtype), num_layers)
            closed = subject.run(
                model,
                params,
                example,
                start=(i, output.hidden[i]),
                gates=gates,
                replacement=_at(i, outputs, num_layers),
            )
            return answer(closed.logits, example).sum()

        if not output.maps[i].shape[-3]:
            return jnp.zeros((*output.hidden[i].shape[:-1], 0, 0))
        return jax.grad(score)(subject.head_outputs(output.maps[i]))

    return output, tuple(map(of_layer, range(num_layers)))


def gradient_rollout(
    maps: Sequence[attention.AttentionMap],
    gradients: Sequence[Array],
    rows: layer_chain.Rows,
    *,
    per_layer: bool = False,
) -> Array:
    """Returns the roll-out of attention weighted by what an answer depends on.

    A layer's matrix is `I + A`, with A the mean over heads of `max(a g, 0)`, where g is
    the derivative of the answer with respect to the weight a. Rows do not sum to 1. It
    takes `O(H R T)` memory beside a tile's.

    Args:
      maps: One per layer, of shape (B..., H, T, T), with values.
      gradients: Per layer `[B..., T, H, V]`, from `output_gradients`; whatever for a
        layer without heads.
      rows: Which of the T positions of the last layer; see `layer_chain.positions_of`.
      per_layer: Whether to return the roll-outs up to each layer too; one pass in all.

    Returns:
      `[B..., R, T]`, what each row has of each input; with `per_layer` `[L, B..., R,
      T]`, at place l with layer l as the last.

    Raises:
      ValueError: If maps are not of self-attention, have no values, or rows or
        gradients do not fit.

    Source: Chefer et al. 2021, eq. 5 and 6, https://arxiv.org/abs/2103.15679.
    """
    start = layer_chain.start_of(maps, rows)
    layer_chain.check_per_layer("gradients", gradients, maps)
    layers = [
        functools.partial(_depended_on, layer, _checked(gradient, layer))
        for layer, gradient in zip(maps, gradients, strict=True)
    ]
    return layer_chain.chained(layers, start, per_layer=per_layer)


def _at(i, x, num_layers):
    """Returns a list of L entries, None but for `x` at i."""
    return [x if j == i else None for j in range(num_layers)]


def _checked(gradient, attention_map):
    if not attention_map.shape[-3]:
        return None
    wanted = layer_chain.values_of(attention_map).shape  # S = T
    if jnp.shape(gradient) != wanted:
        raise ValueError(
            f"gradients must be [B..., T, H, V] of each layer, {wanted} here, got "
            f"shape {jnp.shape(gradient)}."
        )
    return jnp.asarray(gradient, attention_map.dtype)


def _depended_on(attention_map, gradient, columns):
    """Returns `(I + A)^T` times columns `[B..., T, R]`; see `gradient_rollout`."""
    *batch_shape, num_heads, size, _ = attention_map.shape
    if not num_heads:
        return columns
    values = layer_chain.values_of(attention_map)
    most = math.isqrt(_TILE_WEIGHTS // max(1, math.prod(batch_shape) * num_heads))
    width = min(size, _TILE, max(16, most))
    starts = jnp.arange(0, size, width)

    def block(start):
        """Returns positions, the last one again past the end, and which are new."""
        positions = start + jnp.arange(width)
        return jnp.minimum(positions, size - 1), positions < size

    def of_rows(total, start):
        queries, is_new = block(start)
        slopes_at = jnp.take(gradient, queries, axis=-3)
        is_new = is_new.reshape(*(1,) * len(batch_shape), width, 1)
        own = jnp.where(is_new, jnp.take(columns, queries, axis=-2), 0)

        def of_tile(start):
            keys, _ = block(start)
            slopes = jnp.einsum(
                "...thv,...shv->...hts", slopes_at, jnp.take(values, keys, axis=-3)
            )
            tile = attention_map.tile(queries, keys) * jnp.maximum(slopes, 0)
            return jnp.einsum("...hts,...tr->...sr", tile, own)

        parts = jnp.moveaxis(lax.map(of_tile, starts), 0, -3)
        parts = parts.reshape(*batch_shape, len(starts) * width, columns.shape[-1])
        return total + parts[..., :size, :], None

    total, _ = lax.scan(of_rows, jnp.zeros_like(columns), starts)
    return columns + total / num_heads
