"""What tasks over independent, uniform tokens share: how examples are drawn."""

import abc
import dataclasses
from typing import Any

import jax

from mha_haiku import fields
from mha_haiku.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformTokensTask(base.UniformTask):
    """A target at each position of a sequence of independent, uniform tokens.

    All positions count. Unless a subclass says otherwise, the targets are tokens, and
    each is uniform on its own.
    """

    sequence_length: int = fields.option(16, "tokens in an example", sampling.count(1))
    num_tokens: int = fields.option(10, "number of different tokens", sampling.count(2))

    @abc.abstractmethod
    def targets(self, inputs: jax.Array) -> jax.Array:
        """Returns the `[T]` int32 targets of `[T]` int32 tokens."""

    def example(self, key: jax.Array, data: Any) -> base.Example:
        del data
        random = sampling.words(key, self.sequence_length)
        inputs = sampling.integers(random, self.num_tokens)
        return base.Example(inputs, self.targets(inputs), base.all_count(inputs))
