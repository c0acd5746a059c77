"""Continue a sequence of a Markov chain that differs between examples."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku.core import fields
from mha_haiku.training.tasks import base, sampling

_MOST_STATES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovChains(base.UniformTask):
    """Each example draws a chain, then T + 1 states of it; the target is the next one.

    The rows of the transition matrix are independent and uniform over all
    distributions (Dirichlet with parameters 1); the first state is uniform. Example,
    T = 5 and 3 states:

        inputs   0 2 2 1 0
        targets  2 2 1 0 2
        weights  1 1 1 1 1

    Having seen n[i] transitions from the current state i, n[i, j] of them to j, the
    best prediction of j is (n[i, j] + 1) / (n[i] + num_tokens): the bigrams of the
    context. The chain cannot be known from anything else.

    Metric: accuracy over all positions. Chance: 1 / num_tokens, loss log(num_tokens)
    nats.

    Source: Edelman et al. 2024, https://arxiv.org/abs/2402.11004.
    """

    name: ClassVar[str] = "markov_chains"
    continues: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 64}
    sequence_length: int = fields.field(64, "tokens in an example", sampling.count(1))
    num_tokens: int = fields.field(
        3, "states of a chain", fields.integer(2, _MOST_STATES)
    )

    def example(self, key: jax.Array, data: Any) -> base.Example:
        count = self.num_tokens
        random = sampling.words(key, count**2 + self.sequence_length + 1)
        # In (0, 1), 24 bits each. Exponential variables, divided by their sum, are a
        # uniform distribution.
        uniform = ((random >> 8).astype(jnp.float32) + 0.5) / 2**24
        rows = -jnp.log(uniform[: count**2]).reshape(count, count)
        upper = jnp.cumsum(rows, axis=1) / jnp.sum(rows, axis=1, keepdims=True)

        def step(state, number):
            following = jnp.sum(number >= upper[state, :-1], dtype=jnp.int32)
            return following, following

        first = sampling.integers(random[-1], count)
        _, targets = jax.lax.scan(step, first, uniform[count**2 : -1])
        inputs = jnp.concatenate([first[None], targets[:-1]])
        return base.Example(inputs, targets, base.all_count(targets))
