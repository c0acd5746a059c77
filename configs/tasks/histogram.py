"""Count how often each token occurs."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training.tasks import uniform_tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(uniform_tasks.UniformTokensTask):
    """The target at position t is how often the token at t occurs in the sequence.

        inputs   3 1 4 1 5
        targets  1 2 1 2 1
        weights  1 1 1 1 1

    Chance: the likeliest count, which is 1 plus a binomial variable of T - 1 trials
    with probability 1 / num_tokens. Class c is the count c (0 never occurs).

    Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981.
    """

    name: ClassVar[str] = "histogram"

    @property
    def num_classes(self) -> int:
        return self.sequence_length + 1

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        from scipy import special

        others = np.arange(self.sequence_length)
        at_most = special.bdtr(others, self.sequence_length - 1, 1 / self.num_tokens)
        probabilities = np.maximum(np.diff(at_most, prepend=0.0), 0.0)
        loss = special.entr(probabilities).sum()
        return {"accuracy": float(probabilities.max()), "loss": float(loss)}

    def targets(self, inputs: jax.Array) -> jax.Array:
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        counts = jnp.sum(inputs[:, None] == tokens[None, :], axis=0, dtype=jnp.int32)
        return counts[inputs]
