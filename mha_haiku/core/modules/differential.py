"""Differential attention: two maps per head, whose difference weighs the values."""

import haiku as hk
import jax.numpy as jnp
from jax import Array

from mha_haiku.core.modules import multi_head_attention, norms

_START = 0.8  # lambda at initialization, about; the same at every depth
_EPSILON = 1e-5


class DifferentialAttention(multi_head_attention.MultiHeadAttention):
    """Attention whose heads are differences of two maps that share their values.

    `num_heads` counts maps, and two consecutive maps are a head, so that the
    projections have the sizes of plain attention. A head's output is the first map's
    values less lambda times the second map's, normalized by the root mean square, times
    1 - 0.8. Lambda is `exp(q1 . k1) - exp(q2 . k2) + 0.8`, with learned vectors `[K]`.
    Maps, weights and the site "heads" (`[B..., T, H, 2 V]`) are before the difference.

    Source: Ye et al. 2024, section 2.1, https://arxiv.org/abs/2410.05258; the paper's
    default grows to 0.8 with depth; 0.8 in every layer is one of its ablations.
    """

    def __init__(self, num_heads: int, key_size: int, *args, **options):
        super().__init__(num_heads, key_size, *args, **options)
        is_grouped = self.num_key_value_heads != num_heads or self.groups is not None
        if num_heads % 2 or is_grouped:
            raise ValueError(
                "differential attention needs an even num_heads, two maps per head, "
                f"and as many key/value heads, got {num_heads} and "
                f"{self.num_key_value_heads}."
            )

    def _shared(self, value: Array) -> Array:
        """Joins the values of the two maps of each head: `[B..., S, H, 2 V]`."""
        *shape, num_maps, size = value.shape
        pairs = value.reshape(*shape, num_maps // 2, 2 * size)
        return jnp.repeat(pairs, 2, axis=-2)

    @hk.transparent
    def _combined(self, values: Array) -> Array:
        """Computes the normalized differences `[B..., T, H / 2, 2 V]`."""
        start = hk.initializers.RandomNormal(0.1)
        vectors = {
            name: hk.get_parameter(f"lambda_{name}", (self.key_size,), init=start)
            for name in ("query_1", "key_1", "query_2", "key_2")
        }
        first, second = (
            jnp.exp(vectors[f"query_{i}"] @ vectors[f"key_{i}"]) for i in (1, 2)
        )
        share = (first - second + _START).astype(values.dtype)
        difference = values[..., ::2, :] - share * values[..., 1::2, :]
        normed = norms.RMSNorm(_EPSILON, name="difference_norm")(difference)
        return normed * (1 - _START)
