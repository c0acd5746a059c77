"""Continue a random sequence that was seen once before."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku import checks, fields
from mha_haiku.tasks import base as task_lib
from mha_haiku.tasks import sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(task_lib.Task):
    """Random tokens, all different, then the same again from a random place, round it.

    The target is the next token, as for a causal language model. Only those of the
    second half count that can be known: where the current token was followed by the
    target before. Left out are the end of the first round (what follows it now never
    did before) and the last position (nothing follows). Example, T = 10, from place 2:

        inputs   3 1 4 0 5 4 0 5 3 1
        targets  1 4 0 5 4 0 5 3 1 .
        weights  0 0 0 0 0 1 1 0 1 0

    As the place is random, no fixed distance leads to the answer. It takes one layer to
    tell each position what stood before it, and a second to look for the current token
    there: an induction head. One layer can at best tell which tokens are still to come,
    right in about (log(T / 2) + 0.6) / (T / 2) of the cases.

    Metric: accuracy over the positions that count. Chance: one token in `num_tokens`,
    and its logarithm in nats.

    Attributes:
      sequence_length: T, even and at least 4.
      num_tokens: Number of different tokens, at least T / 2; also the classes.

    Source: Olsson et al. 2022, https://arxiv.org/abs/2209.11895.
    """

    name: ClassVar[str] = "induction"
    sequence_length: int = fields.option(
        32, "tokens in an example, an even number", fields.integer(4, sampling.LARGEST)
    )
    num_tokens: int = fields.option(
        32, "vocabulary", fields.integer(2, sampling.LARGEST)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.sequence_length % 2:
            raise checks.ConfigError(
                f"sequence_length must be even, got {self.sequence_length!r}."
            )
        half = self.sequence_length // 2
        checks.integer_in("num_tokens", self.num_tokens, half, sampling.LARGEST)

    @property
    def num_classes(self) -> int:
        """Number of classes, one per token."""
        return self.num_tokens

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level: every target is uniform over the tokens."""
        return {"accuracy": 1 / self.num_tokens, "loss": math.log(self.num_tokens)}

    def example(self, key: jax.Array, data: Any) -> task_lib.Example:
        """Returns one example; `data` is unused."""
        del data
        half = self.sequence_length // 2
        random = sampling.words(key, self.num_tokens + 1)
        first = sampling.distinct(random[1:], half)
        place = (sampling.integers(random[0], half) + jnp.arange(half)) % half
        inputs = jnp.concatenate([first, first[place]])
        targets = jnp.concatenate([inputs[1:], jnp.zeros(1, jnp.int32)])
        known = (place != half - 1) & (jnp.arange(half) != half - 1)
        weights = jnp.concatenate([jnp.zeros(half), known]).astype(jnp.float32)
        return task_lib.Example(inputs, targets, weights)
