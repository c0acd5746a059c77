"""Haiku's MultiHeadAttention."""

from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(case: str, size: int, attention: Mapping[str, Any]) -> worker.Program:
    """Prepares calls of self-attention."""
    shape = sizes.AttentionSize(**attention)

    def apply(x):
        mask = jax_programs.causal(x.shape[1])[None, None] if shape.is_causal else None
        module = hk.MultiHeadAttention(
            shape.heads, shape.head_width, w_init=hk.initializers.VarianceScaling()
        )
        return module(x, x, x, mask)

    module = hk.without_apply_rng(hk.transform(apply))
    x = jax_programs.normal(0, (1, 1, shape.width))
    params = jax.jit(module.init)(jax.random.key(0), x)
    return jax_programs.attention(params, module.apply, shape, case=case, calls=size)
