"""Repeat the sequence in reverse order."""

import dataclasses
from typing import ClassVar

import jax

from mha_haiku.tasks import uniform_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reverse(uniform_tokens.UniformTokensTask):
    """The target at position t is the token at position T - 1 - t.

    Tokens are independent and uniform. Example, T = 5 and 10 tokens:

        inputs   3 1 4 1 5
        targets  5 1 4 1 3
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance: accuracy 1 / num_tokens, loss
    log(num_tokens) nats. A head that solves it attends along the anti-diagonal.
    """

    name: ClassVar[str] = "reverse"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs[::-1]
