"""Ablation values, which ablated heads pass on: zero, the mean, another example's.

B batch, T positions, P attention parts, H heads of a part, V value size per head.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku import models, tasks
from mha_haiku.heads import subject

Array = jax.Array

# From the heads' outputs with no head ablated, P arrays `[B, T, H, V]`, to the ablation
# values of each part, `[H, V]` or `[B, T, H, V]`, or None for zeros.
Closing = Callable[[Sequence[Array]], list[Array] | None]


def zero(heads: Sequence[Array]) -> None:
    """Ablated heads pass on zeros.

    Source: Michel et al. 2019, section 2.3, https://arxiv.org/abs/1905.10650.
    """
    del heads


def resample(heads: Sequence[Array]) -> list[Array]:
    """Ablated heads pass on their output for the next example of the batch.

    Source: Chan et al. 2022, https://www.alignmentforum.org/posts/JvZhhzycHu2Yd57RN.
    """
    return [jnp.roll(each, -1, axis=0) for each in heads]


def mean(model: models.Model, params: Any, batches: Iterable[tasks.Example]) -> Closing:
    """Returns the closing where heads pass on their mean over data and positions.

    Args:
      model: The model.
      params: Its parameters.
      batches: The data; padding positions are left out of the mean.

    Source: Wang et al. 2022, section 2.1, https://arxiv.org/abs/2211.00593.
    """

    @jax.jit
    def sums(params, example):
        model_and_params = subject.compact(model, params)
        _, found = subject.look(*model_and_params, example, ["*/heads"])

        def total(name, values):
            batch_size, length, *_ = values.shape
            counted = jnp.ones((batch_size, length), jnp.float32)
            _, lengths = subject.queries(example, subject.kind_of(name))
            if lengths is not None:
                counted = (jnp.arange(length)[None] < lengths[:, None]) * 1.0
            return jnp.einsum("bt,bthv->hv", counted, values), counted.sum()

        return [total(name, values) for name, values in found.items()]

    batch_sums = subject.over(batches, lambda example: sums(params, example))
    layers = functools.reduce(
        lambda total, each: jax.tree.map(jnp.add, total, each), batch_sums
    )
    means = [total / count for total, count in layers]
    return lambda heads: means
