"""Embeddings of tokens."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(eq=False, repr=False)
class TokenEmbedding(hk.Module):
    """A learned vector per token, which may serve for logits as well."""

    num_tokens: int
    size: int
    name: str | None = None
    _: dataclasses.KW_ONLY
    w_init: hk.initializers.Initializer = hk.initializers.RandomNormal(1.0)

    def __call__(self, tokens: Array) -> Array:
        """Embeds tokens `[...]`, clipped to 0..C - 1, as `[..., D]`."""
        return jnp.take(self._table(), tokens, axis=0, mode="clip")

    @hk.name_like("__call__")
    def logits(self, x: Array, num_classes: int | None = None) -> Array:
        """Multiplies `[..., D]` with the embeddings of the first `num_classes` tokens.

        Source: Press and Wolf 2017, section 3, https://arxiv.org/abs/1608.05859.
        """
        return jnp.einsum("...d,cd->...c", x, self._table()[:num_classes])

    @hk.transparent
    def _table(self) -> Array:
        shape = (self.num_tokens, self.size)
        return hk.get_parameter("embeddings", shape, init=self.w_init)
