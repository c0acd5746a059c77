"""Count how often each token occurs in the sequence."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from mha_haiku.training.tasks import uniform_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(uniform_tokens.UniformTokensTask):
    """The target at position t is how often the token at t occurs in the sequence.

    Tokens are independent and uniform. Example, T = 5 and 10 tokens:

        inputs   3 1 4 1 5
        targets  1 2 1 2 1
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance: the likeliest count. A count is 1
    plus a binomial variable of T - 1 trials with probability 1 / num_tokens, whose
    largest probability and entropy are computed exactly.

    Class c is the count c (0 never occurs).

    Source: Weiss et al. 2021, https://arxiv.org/abs/2106.06981.
    """

    name: ClassVar[str] = "histogram"

    @property
    def num_classes(self) -> int:
        """Number of classes: the counts 0 to T."""
        return self.sequence_length + 1

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level, from the distribution of a count."""
        trials = self.sequence_length - 1
        hit, miss = math.log(1 / self.num_tokens), math.log1p(-1 / self.num_tokens)
        logs = [
            math.lgamma(trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * hit
            + (trials - k) * miss
            for k in range(trials + 1)
        ]
        loss = -sum(math.exp(log) * log for log in logs)
        return {"accuracy": math.exp(max(logs)), "loss": loss}

    def targets(self, inputs: jax.Array) -> jax.Array:
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        counts = jnp.sum(inputs[:, None] == tokens[None, :], axis=0, dtype=jnp.int32)
        return counts[inputs]
