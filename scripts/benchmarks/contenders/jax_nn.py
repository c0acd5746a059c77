"""jax.nn.dot_product_attention between projections written out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
    params = {
        name: {
            "weights": jax_programs.normal(seed, (shape.width, shape.width))
            / shape.width**0.5,
            "bias": jnp.zeros(shape.width),
        }
        for seed, name in enumerate(("query", "key", "value", "output"))
    }

    def projected(params, x):
        return x @ params["weights"] + params["bias"]

    def apply(params, x):
        query, key, value = (
            projected(params[name], x).reshape(*x.shape[:-1], shape.heads, -1)
            for name in ("query", "key", "value")
        )
        values = jax.nn.dot_product_attention(
            query, key, value, is_causal=shape.is_causal
        )
        return projected(params["output"], values.reshape(x.shape))

    return jax_programs.attention(params, apply, shape, case=case, calls=size)
