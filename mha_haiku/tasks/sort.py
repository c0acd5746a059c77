"""Give the tokens in increasing order."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import checks
from mha_haiku.tasks import sampling
from mha_haiku.tasks import task as task_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort(task_lib.Task):
    """The target at position t is the t-th smallest token, counted with repeats.

    Tokens are independent and uniform. Example, T = 5 and 10 tokens:

        inputs   3 1 4 1 5
        targets  1 1 3 4 5
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance: the likeliest token of each place in
    the order (small ones stand first), well above one in `num_tokens`; exact, from the
    binomial distribution of how many tokens are at most c.

    Attributes:
      sequence_length: T.
      num_tokens: Number of different tokens, 0 to num_tokens - 1; also the classes.
    """

    name: ClassVar[str] = "sort"
    sequence_length: int
    num_tokens: int

    def __post_init__(self):
        checks.integer_in("sequence_length", self.sequence_length, 1, sampling.LARGEST)
        checks.integer_in("num_tokens", self.num_tokens, 2, sampling.LARGEST)

    @property
    def num_classes(self) -> int:
        """Number of classes, one per token."""
        return self.num_tokens

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level, of the distribution of the target at each position."""
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

    def example(self, key: jax.Array, data: Any) -> task_lib.Example:
        """Returns one example; `data` is unused."""
        del data
        random = sampling.words(key, self.sequence_length)
        inputs = sampling.integers(random, self.num_tokens)
        return task_lib.Example(inputs, jnp.sort(inputs), task_lib.all_count(inputs))
