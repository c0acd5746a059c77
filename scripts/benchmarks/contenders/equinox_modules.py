"""Equinox's MultiheadAttention, made for one example and mapped over the batch."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(case: str, size: int, attention: Mapping[str, Any]) -> worker.Program:
    """Prepares calls of attention.

    Args:
      case: "forward" or "forward_and_backward".
      size: Calls in a run.
      attention: Fields of `sizes.AttentionSize`.
    """
    shape = sizes.attention_size(attention)
    biases = ("query", "key", "value", "output")
    module = eqx.nn.MultiheadAttention(
        shape.heads,
        shape.width,
        **{f"use_{name}_bias": True for name in biases},
        key=jax.random.key(0),
    )
    params, rest = eqx.partition(module, eqx.is_array)

    def apply(params, x):
        mask = jax_programs.causal(x.shape[1]) if shape.is_causal else None
        module = eqx.combine(params, rest)
        return jax.vmap(lambda x: module(x, x, x, mask))(x)

    return jax_programs.attention(params, apply, shape, case=case, calls=size)
