"""Copy, reverse, sort or count independent, uniform tokens."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

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
class Copy(UniformTokensTask):
    """The target at position t is the token at position t.

        inputs   3 1 4 1 5
        targets  3 1 4 1 5
        weights  1 1 1 1 1

    A head that solves it attends along the diagonal; even a residual connection solves
    it too.
    """

    name: ClassVar[str] = "copy"

    def targets(self, inputs: jax.Array) -> jax.Array:
        return inputs


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort(UniformTokensTask):
    """The target at position t is the t-th smallest token, counted with repeats.

        inputs   3 1 4 1 5
        targets  1 1 3 4 5
        weights  1 1 1 1 1

    Chance: the likeliest token at each position, since small tokens come first. That is
    well above 1 / num_tokens; computed exactly, from the binomial distribution of the
    number of tokens that are at most c.
    """

    name: ClassVar[str] = "sort"

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        from scipy import special  # jax needs scipy; imported late as it is slow

        t = np.arange(self.sequence_length)[:, None]
        at_most = np.arange(1, self.num_tokens)[None, :] / self.num_tokens
        # The t-th smallest is at most c when more than t tokens are.
        cumulative = special.bdtrc(t, self.sequence_length, at_most)
        probabilities = np.diff(cumulative, axis=1, prepend=0.0, append=1.0)
        probabilities = np.maximum(probabilities, 0.0)
        return {
            "accuracy": float(probabilities.max(axis=1).mean()),
            "loss": float(special.entr(probabilities).sum(axis=1).mean()),
        }

    def targets(self, inputs: jax.Array) -> jax.Array:
        return jnp.sort(inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram(UniformTokensTask):
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
