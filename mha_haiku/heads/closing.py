"""What a closed head passes on: zero, its mean, or that of another example.

B batch, T positions, L layers, H heads of a layer, V value size per head.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku import models, tasks
from mha_haiku.heads import subject

Array = jax.Array

# A function of the `Output` with all heads open: what closed heads pass on instead of
# their outputs, per layer `[H, V]` or `[B, T, H, V]`, or None for zeros.
Closing = Callable[[models.Output], list[Array] | None]


def zero(clean: models.Output) -> None:
    """Closed heads pass on nothing.

    Source: Michel et al. 2019, section 2.3, https://arxiv.org/abs/1905.10650.
    """
    del clean


def resample(clean: models.Output) -> list[Array]:
    """Closed heads pass on their output for the next example of the batch.

    Source: Chan et al. 2022, https://www.alignmentforum.org/posts/JvZhhzycHu2Yd57RN.
    """
    return subject.of_maps(
        clean.maps, lambda each: jnp.roll(subject.head_outputs(each), -1, axis=0)
    )


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
        output = subject.run(*subject.compact(model, params), example)

        def total(attention_map, kind):
            batch_size, *_, length, _ = attention_map.shape
            counted = jnp.ones((batch_size, length), jnp.float32)
            _, lengths = subject.queries(example, kind)
            if lengths is not None:
                counted = (jnp.arange(length)[None] < lengths[:, None]) * 1.0
            outputs = subject.head_outputs(attention_map)
            return jnp.einsum("bt,bthv->hv", counted, outputs), counted.sum()

        return subject.of_kinds(output.maps, total)

    batch_sums = subject.over(batches, lambda example: sums(params, example))
    layers = functools.reduce(
        lambda total, each: jax.tree.map(jnp.add, total, each), batch_sums
    )
    means = [total / count for total, count in layers]
    return lambda clean: means
