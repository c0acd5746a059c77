"""Attention whose heads are all pruned."""

from typing import Any

import haiku as hk
import jax.numpy as jnp
from jax import Array

from mha_haiku.core import attention, masks
from mha_haiku.core.attention import map_sites
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.modules import multi_head_attention


class NoAttention(multi_head_attention.CachedModule):
    """Attention whose heads are all pruned: only the output bias remains."""

    def __init__(
        self, model_size: int, *, with_bias: bool = True, name: str | None = None
    ):
        """Initializes the module for width D; without a bias the output is zero."""
        super().__init__(name=name)
        self.model_size = model_size
        self.with_bias = with_bias

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: masks.Mask | Array | None = None,
        *,
        step: multi_head_attention.Step | None = None,
        **options,
    ) -> tuple[Array, attention.AttentionMap, *tuple[Any, ...]]:
        """Returns the bias at every query, and a map of shape `(B..., 0, T, S)`."""
        del value, options
        output = jnp.zeros((*query.shape[:-1], self.model_size), query.dtype)
        if self.with_bias:
            output = Bias(name="linear")(output)
        no_map = map_of_no_heads(query, key, mask)
        return (output, no_map) if step is None else (output, no_map, step.cache)


class Bias(hk.Module):
    """A bias "b" without weights."""

    def __call__(self, x: Array) -> Array:
        """Adds the bias to `x` `[..., D]`."""
        bias = hk.get_parameter("b", x.shape[-1:], x.dtype, init=jnp.zeros)
        return x + jnp.broadcast_to(bias, x.shape)


def map_of_no_heads(
    query: Array, key: Array, mask: masks.Mask | Array | None
) -> attention.AttentionMap:
    """Makes the map `(B..., 0, T, S)` of `[B..., T, D]` and `[B..., S, D]`."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    keys = jnp.zeros((*key.shape[:-1], 0, 1), key.dtype)
    mask = masks.as_mask(mask).aligned(query.ndim - 2)
    no_map = attention.AttentionMap(
        query=jnp.zeros((*query.shape[:-1], 0, 1), query.dtype),
        key=keys,
        log_sum=LogSum.rounded(
            jnp.zeros((*query.shape[:-2], 0, query.shape[-2]), dtype)
        ),
        weighting=Weighting(mask, score=attention.dot_product()),
        value=keys,
    )
    return map_sites.sited(jnp.zeros_like(no_map.query), no_map)[1]
