"""Embeddings of tokens.

`...` leading axes, C vocabulary, D width.
"""

import haiku as hk
import jax
import jax.numpy as jnp

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
        """Embeds tokens `[...]` in 0..C - 1 as `[..., D]`."""
        return embed(tokens, self._table())

    @hk.name_like("__call__")
    def logits(self, x: Array, num_classes: int | None = None) -> Array:
        """Multiplies `[..., D]` with the embeddings of all tokens.

        They are of the first `num_classes` tokens; None: of all C.

        Source: Press and Wolf 2017, section 3, https://arxiv.org/abs/1608.05859.
        """
        return jnp.einsum("...d,cd->...c", x, self._table()[:num_classes])

    @hk.transparent
    def _table(self) -> Array:
        shape = (self.num_tokens, self.size)
        return hk.get_parameter("embeddings", shape, init=self.w_init)


def embed(tokens: Array, table: Array) -> Array:
    """Looks up tokens `[...]` in the table `[C, D]`: `[..., D]`.

    A token below 0 names the first row, one above C - 1 the last.
    """
    return jnp.take(table, tokens, axis=0, mode="clip")
