"""Tasks of tokens drawn evenly, each with uniform classes unless it says otherwise."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax

from mha_haiku.core import fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformTokensTask(base.UniformTask):
    """A target at each position of a sequence of independent, uniform tokens.

    All positions count. Unless a subclass says otherwise, the targets are tokens, and
    each is uniform on its own. Metric: accuracy over all positions. Chance: accuracy
    1 / num_tokens, loss log(num_tokens) nats. Examples have T = 5 and 10 tokens.
    """

    sequence_length: int = fields.field(16, "tokens in an example", sampling.count(1))
    num_tokens: int = fields.field(10, "number of different tokens", sampling.count(2))

    @abc.abstractmethod
    def targets(self, inputs: jax.Array) -> jax.Array:
        """Computes the `[T]` int32 targets of `[T]` int32 tokens."""

    def example(self, key: jax.Array, data: Any) -> base.Example:
        random = sampling.words(key, self.sequence_length)
        inputs = sampling.integers(random, self.num_tokens)
        return base.Example(inputs, self.targets(inputs), base.all_count(inputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reverse(UniformTokensTask):
    """The target at position t is the token at position T - 1 - t.

        inputs   3 1 4 1 5
        targets  5 1 4 1 3
        weights  1 1 1 1 1

    A head that solves it attends along the anti-diagonal.
    """

    name: ClassVar[str] = "reverse"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs[::-1]
