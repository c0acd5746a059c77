"""Attention without heads: what is left of a layer whose heads are all pruned.

`B...` batch axes, T query positions, S key positions, D model width.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku import attention, masks

Array = jax.Array


class NoAttention(hk.Module):
    """Adds the bias of the last linear map, and has a map of no heads."""

    def __init__(
        self, model_size: int, *, with_bias: bool = True, name: str | None = None
    ):
        """Initialises the module.

        Args:
          model_size: D, width of the output.
          with_bias: Whether there is a bias; if not, the output is zero.
          name: The module's name.
        """
        super().__init__(name=name)
        self.model_size = model_size
        self.with_bias = with_bias

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: masks.Mask | Array | None = None,
        **options,
    ) -> tuple[Array, attention.AttentionMap]:
        """Returns the bias at every query, and a map of shape `(B..., 0, T, S)`.

        Arguments are those of `MultiHeadAttention`; of the options none matters.
        """
        del value, options
        output = jnp.zeros((*query.shape[:-1], self.model_size), query.dtype)
        if self.with_bias:
            output = output + _Bias(name="linear")(output)
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        return output, attention.AttentionMap(
            query=jnp.zeros((*query.shape[:-1], 0, 1), query.dtype),
            key=jnp.zeros((*key.shape[:-1], 0, 1), key.dtype),
            logsumexp=jnp.zeros((*query.shape[:-2], 0, query.shape[-2]), dtype),
            mask=masks.as_mask(mask),
            bias=None,
            score=attention.dot_product(),
        )


class _Bias(hk.Module):
    """The bias "b" of a linear map that has no inputs."""

    def __call__(self, like: Array) -> Array:
        bias = hk.get_parameter("b", like.shape[-1:], like.dtype, init=jnp.zeros)
        return jnp.broadcast_to(bias, like.shape)
