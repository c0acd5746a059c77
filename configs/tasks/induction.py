"""Continue a random sequence that is repeated."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(base.UniformTask):
    """T / 2 different random tokens, then the same tokens in a random rotation.

    The target is the next token, as for a causal language model. Targets count only in
    the second half, and only if the target followed the current token in the first
    half. So two positions of the second half do not count: the one whose token ended
    the first half, and the last position. Example, T = 10, rotated by 2:

        inputs   3 1 4 0 5 4 0 5 3 1
        targets  1 4 0 5 4 0 5 3 1 .
        weights  0 0 0 0 0 1 1 0 1 0

    As the rotation is random, no fixed offset leads to the answer. One layer must write
    to each position the token before it, and a second layer must look there for the
    current token: an induction head. One layer can at best exclude the tokens that have
    been repeated already, with an accuracy of (log(T / 2) + 0.6) / (T / 2).

    Metric: accuracy over the positions that count. Chance: accuracy 1 / num_tokens,
    loss log(num_tokens) nats.

    Source: Olsson et al. 2022, https://arxiv.org/abs/2209.11895.
    """

    name: ClassVar[str] = "induction"
    continues: ClassVar[bool] = True
    model_defaults = {"embedding.max_length": 32}
    sequence_length: int = fields.field(
        32, "tokens in an example, an even number", sampling.count(4)
    )
    num_tokens: int = fields.field(32, "number of different tokens", sampling.count(2))

    def __post_init__(self):
        super().__post_init__()
        if self.sequence_length % 2:
            raise checks.ConfigError(
                f"sequence_length must be even, got {self.sequence_length!r}."
            )
        half = self.sequence_length // 2
        checks.integer_in("num_tokens", self.num_tokens, half, sampling.LARGEST)

    def example(self, key: jax.Array, data: Any) -> base.Example:
        half = self.sequence_length // 2
        random = sampling.words(key, self.num_tokens + 1)
        first = sampling.distinct(random[1:], half)
        source = (sampling.integers(random[0], half) + jnp.arange(half)) % half
        inputs = jnp.concatenate([first, first[source]])
        targets = jnp.concatenate([inputs[1:], jnp.zeros(1, jnp.int32)])
        known = (source != half - 1) & (jnp.arange(half) != half - 1)
        weights = jnp.concatenate([jnp.zeros(half), known]).astype(jnp.float32)
        return base.Example(inputs, targets, weights)
