"""What cuDNN is asked for, computed by XLA from the matrix of scores."""

import jax
import jax.numpy as jnp

from mha_haiku.core.attention import kernels


class XLA(kernels.CuDNN):
    """The kernel of cuDNN without cuDNN."""

    def run(self, arrays, lengths, is_causal, window, scale):
        query_lengths, key_lengths = lengths
        values, logsumexp = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in arrays),
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=window,
            implementation="xla",
            return_residual=True,
        )
        return values.astype(arrays[2].dtype), jnp.swapaxes(logsumexp, -1, -2)
