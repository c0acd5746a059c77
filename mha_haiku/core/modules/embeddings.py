"""Embeddings of tokens and of positions.

`...` leading axes, T positions, C vocabulary, D width, H heads.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from mha_haiku.core import positions

Array = jax.Array


class TokenEmbedding(hk.Module):
    """A learned vector per token, which may serve for logits as well."""

    def __init__(
        self,
        num_tokens: int,
        size: int,
        name: str | None = None,
        *,
        w_init: hk.initializers.Initializer | None = None,
    ):
        """Initialises the module for C = `num_tokens` vectors of D = `size`.

        They are normal with deviation 1 at first unless `w_init` is given.
        """
        super().__init__(name=name)
        self.num_tokens = num_tokens
        self.size = size
        self.w_init = w_init or hk.initializers.RandomNormal(1.0)

    def __call__(self, tokens: Array) -> Array:
        """Returns the embeddings `[..., D]` of tokens `[...]` in 0..C - 1."""
        return embed(tokens, self._table())

    @hk.name_like("__call__")
    def logits(self, x: Array, num_classes: int | None = None) -> Array:
        """Returns the dot products of `[..., D]` with the embeddings of tokens.

        They are of the first `num_classes` tokens; None: of all C.

        Source: Press and Wolf 2017, section 3, https://arxiv.org/abs/1608.05859.
        """
        return jnp.einsum("...d,cd->...c", x, self._table()[:num_classes])

    @hk.transparent
    def _table(self) -> Array:
        shape = (self.num_tokens, self.size)
        return hk.get_parameter("embeddings", shape, init=self.w_init)


class LearnedPositions(hk.Module):
    """A learned vector per position.

    Source: Gehring et al. 2017, section 3.1, https://arxiv.org/abs/1705.03122.
    """

    def __init__(self, max_length: int, name: str | None = None):
        """Initialises the module for positions 0..`max_length` - 1."""
        super().__init__(name=name)
        self.max_length = max_length

    def __call__(self, x: Array, first: int | Array = 0) -> Array:
        """Returns `x` `[..., T, D]` plus the encodings of positions from `first` on."""
        length, size = x.shape[-2:]
        if length > self.max_length:
            raise ValueError(
                f"there are learned positions for {self.max_length} tokens, got "
                f"{length}."
            )
        init = hk.initializers.RandomNormal(0.02)
        table = hk.get_parameter("positions", (self.max_length, size), x.dtype, init)
        if isinstance(first, int):
            own = table[first : first + length]
        else:
            own = jax.lax.dynamic_slice_in_dim(table, first, length)
        return x + own.reshape((1,) * (x.ndim - 2) + (length, size))


class RelativePositions(hk.Module):
    """Learned score biases per bucket of distance; see `positions.relative_bias`."""

    def __init__(
        self,
        num_heads: int,
        *,
        bidirectional: bool,
        num_buckets: int = 32,
        max_distance: int = 128,
        name: str | None = None,
    ):
        """Initialises the module; the arguments are those of `relative_bias`."""
        super().__init__(name=name)
        self.num_heads = num_heads
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance

    def __call__(self) -> positions.ScoreBias:
        """Returns the bias."""
        init = hk.initializers.RandomNormal(0.02)
        table = hk.get_parameter("table", (self.num_buckets, self.num_heads), init=init)
        return positions.relative_bias(
            table, bidirectional=self.bidirectional, max_distance=self.max_distance
        )


def embed(tokens: Array, table: Array) -> Array:
    """Returns the rows `[..., D]` of the table `[C, D]` that tokens `[...]` name.

    A token below 0 names the first row, one above C - 1 the last.
    """
    return jnp.take(table, tokens, axis=0, mode="clip")
