"""How the next token is chosen: the likeliest, a random one, or the best of a beam.

A strategy is a static value: a program is compiled for each.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mha_haiku.core import checks

Array = jax.Array


class Strategy:
    """How texts are continued.

    `choose(logits, keys)` gives a token `[B]` for logits `[B, C]` and PRNG keys `[B]`,
    unless it is a `Beam`, whose choice is not final.
    """


@dataclasses.dataclass(frozen=True)
class Greedy(Strategy):
    """The likeliest token, the first of those that are alike."""

    def choose(self, logits: Array, keys: Array) -> Array:
        del keys
        return jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class Sampled(Strategy):
    """A random token, by the model's probabilities.

    Attributes:
      temperature: Logits are divided by it; 0 leaves the likeliest token alone.
      top_k: Only so many of the likeliest tokens are drawn from; None: all.
      top_p: Only the likeliest tokens are drawn from that have this share of the
        probability together, in (0, 1]; None: all. After temperature and `top_k`.

    Source: Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        checks.non_negative_number("temperature", self.temperature)
        if self.top_k is not None:
            checks.positive_integer("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a number in (0, 1], got {self.top_p!r}.")

    def choose(self, logits: Array, keys: Array) -> Array:
        if not self.temperature:
            return jnp.argmax(logits, axis=-1)
        logits = logits / self.temperature
        if self.top_k is None and self.top_p is None:
            return jax.vmap(jax.random.categorical)(keys, logits)
        # Tokens by falling probability, so that those left out are the last.
        size = logits.shape[-1]
        kept = size if self.top_k is None else min(self.top_k, size)
        logits, tokens = jax.lax.top_k(logits, kept)
        if self.top_p is not None:
            probabilities = jax.nn.softmax(logits)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            logits = jnp.where(before < self.top_p, logits, -jnp.inf)
        chosen = jax.vmap(jax.random.categorical)(keys, logits)
        return jnp.take_along_axis(tokens, chosen[:, None], axis=-1)[:, 0]


@dataclasses.dataclass(frozen=True)
class Beam(Strategy):
    """The best text of those that a beam of partial texts leads to.

    Texts are compared by their log probability over `((5 + n) / 6) ** length_penalty`,
    n tokens long. A text that has ended keeps its place in the beam until better ones
    push it out. With a width of 1 this is `Greedy`.

    Attributes:
      width: How many texts are kept.
      length_penalty: Above 0 longer texts are preferred.

    Source: Wu et al. 2016, section 7, https://arxiv.org/abs/1609.08144.
    """

    width: int
    length_penalty: float = 0.0

    def __post_init__(self):
        checks.positive_integer("width", self.width)
        checks.non_negative_number("length_penalty", self.length_penalty)

    def penalty(self, count: Array) -> Array:
        """Returns what log probabilities of so many tokens are divided by."""
        return ((5 + count) / 6) ** self.length_penalty
