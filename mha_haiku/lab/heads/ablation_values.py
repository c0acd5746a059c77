"""Ablation values, which replace ablated heads: zero, mean, or another example's.

B batch, T positions, P attention parts, H heads of a part, V value size per head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import models
from mha_haiku.lab.heads import model_runs
from mha_haiku.lab.heads.model_runs import Batches
from mha_haiku.training import tasks

Array = jax.Array

# From the outputs of heads without ablation, P arrays `[B, T, H, V]`, to the ablation
# values of each part: `[H, V]` or `[B, T, H, V]`, or None for zeros.
AblationValue = Callable[[Sequence[Array]], Sequence[Array | None]]


def zero(heads: Sequence[Array]) -> list[None]:
    """Replaces ablated heads by zeros.

    Source: Michel et al. 2019, section 2.3, https://arxiv.org/abs/1905.10650.
    """
    return [None for _ in heads]


def resample(heads: Sequence[Array]) -> list[Array]:
    """Replaces ablated heads by their output for the next example of the batch.

    Raises:
      ValueError: If the batch has one example, which would replace its own output.

    Source: Chan et al. 2022, https://www.alignmentforum.org/posts/JvZhhzycHu2Yd57RN.
    """
    if any(len(values) < 2 for values in heads):
        raise ValueError(
            "resampling needs batches of at least two examples, got one of 1: a "
            "function that takes no lengths= gets one text at a time unless all are of "
            "one length."
        )
    return [jnp.roll(values, -1, axis=0) for values in heads]


def mean(model: models.Model, params: Any, batches: Batches) -> AblationValue:
    """Computes the mean output of each head over data and unpadded positions.

    Source: Wang et al. 2022, section 2.1, https://arxiv.org/abs/2211.00593.
    """
    program = _sums(model)
    sums = model_runs.over(batches, lambda example: program(params, example))
    totals = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), sums)
    means = [total / count for total, count in totals]
    return lambda heads: means


@model_runs.compiled
def _sums(
    model: models.Model, params: Any, example: tasks.Example
) -> list[tuple[Array, Array]]:
    _, heads = model_runs.look(model, params, example, ["*/heads"])
    sums = []
    for name, values in heads.items():
        values = model_runs.by_example(values, len(example.inputs))
        counted = 1.0 * model_runs.valid(
            values.shape[1], example, model_runs.kind_of(name)
        )
        sums.append((jnp.einsum("bt,bthv->hv", counted, values), counted.sum()))
    return sums
