"""The attention modules of other libraries on JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes


def prepare(
    case: str, size: int, attention: Mapping[str, Any], library: str
) -> worker.Program:
    """Prepares calls of self-attention.

    Args:
      library: "haiku", "flax", "equinox", or "jax_nn": projections written out around
        jax.nn.dot_product_attention.
    """
    shape = sizes.attention_size(attention)
    params, apply = _MODULES[library](shape)
    return jax_programs.attention(params, apply, shape, case=case, calls=size)


def _haiku(shape):
    import haiku as hk

    def apply(x):
        mask = jax_programs.causal(x.shape[1])[None, None] if shape.is_causal else None
        attention = hk.MultiHeadAttention(
            shape.heads, shape.head_width, w_init=hk.initializers.VarianceScaling()
        )
        return attention(x, x, x, mask)

    module = hk.without_apply_rng(hk.transform(apply))
    x = jax_programs.normal(0, (1, 1, shape.width))
    return jax.jit(module.init)(jax.random.key(0), x), module.apply


def _flax(shape):
    from flax import nnx

    options = {"decode": False, "keep_rngs": False, "rngs": nnx.Rngs(0)}
    module = nnx.MultiHeadAttention(shape.heads, shape.width, **options)
    definition, params = nnx.split(module)

    def apply(params, x):
        return nnx.merge(definition, params)(x, is_causal=shape.is_causal)

    return params, apply


def _equinox(shape):
    import equinox as eqx

    biases = {f"use_{x}_bias": True for x in ("query", "key", "value", "output")}
    module = eqx.nn.MultiheadAttention(
        shape.heads, shape.width, **biases, key=jax.random.key(0)
    )
    params, rest = eqx.partition(module, eqx.is_array)

    def apply(params, x):
        mask = jax_programs.causal(x.shape[1]) if shape.is_causal else None
        module = eqx.combine(params, rest)
        return jax.vmap(lambda x: module(x, x, x, mask))(x)

    return params, apply


def _jax_nn(shape):
    square = (shape.width, shape.width)
    params = {
        name: (jax_programs.normal(i, square) / shape.width**0.5, jnp.zeros(square[0]))
        for i, name in enumerate(("query", "key", "value", "output"))
    }

    def projected(params, x):
        weights, bias = params
        return x @ weights + bias

    def apply(params, x):
        query, key, value = (
            projected(params[name], x).reshape(*x.shape[:-1], shape.heads, -1)
            for name in ("query", "key", "value")
        )
        values = jax.nn.dot_product_attention(
            query, key, value, is_causal=shape.is_causal
        )
        return projected(params["output"], values.reshape(x.shape))

    return params, apply


_MODULES = {"haiku": _haiku, "flax": _flax, "equinox": _equinox, "jax_nn": _jax_nn}
