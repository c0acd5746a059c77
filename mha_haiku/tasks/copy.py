"""Repeat the sequence unchanged."""

import dataclasses
from typing import ClassVar

import jax

from mha_haiku.tasks import uniform_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(uniform_tokens.UniformTokensTask):
    """The target at position t is the token at position t.

    Tokens are independent and uniform. Example, T = 5 and 10 tokens:

        inputs   3 1 4 1 5
        targets  3 1 4 1 5
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance: accuracy 1 / num_tokens, loss
    log(num_tokens) nats. A head that solves it attends along the diagonal; a residual
    connection alone solves it too.
    """

    name: ClassVar[str] = "copy"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs
