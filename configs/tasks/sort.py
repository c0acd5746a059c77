"""Sort tokens."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training.tasks import uniform_tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort(uniform_tasks.UniformTokensTask):
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
