"""Say at each position whether the number of ones so far is odd."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity(base.UniformTask):
    """The target at position t is the parity of the ones at positions 0 to t.

    There is a target per position, as in the studies of state tracking below; the last
    one is the parity of the whole sequence. Bits are independent and uniform. Example,
    T = 6:

        inputs   1 0 1 1 0 1
        targets  1 1 0 1 1 0
        weights  1 1 1 1 1 1

    Metric: accuracy over all positions. Chance: accuracy 1 / 2, loss log 2 nats;
    without any one of the bits so far the parity is uniform.

    Without positions a model cannot tell 1 from 1 1, as the share of ones is the same.
    With a start token before the bits, it can count them. That position does not count.

    Sources: Bhattamishra et al. 2020, https://arxiv.org/abs/2009.11264; Liu et al.
    2023, https://arxiv.org/abs/2210.10749.
    """

    name: ClassVar[str] = "parity"
    num_classes: ClassVar[int] = 2
    sequence_length: int = fields.field(16, "tokens of an example", sampling.count(1))
    has_start: bool = fields.field(
        False, "whether a start token takes the first bit's place"
    )

    def __post_init__(self):
        super().__post_init__()
        fewest = 1 + self.has_start
        checks.integer_in(
            "sequence_length", self.sequence_length, fewest, sampling.LARGEST
        )

    @property
    def num_tokens(self) -> int:
        return 2 + self.has_start

    def token_label(self, token: int) -> str:
        return ("0", "1", "start")[token]

    def class_label(self, c: int) -> str:
        return ("even", "odd")[c]

    def example(self, key: jax.Array, data: Any) -> base.Example:
        # The parities of uniform bits are uniform and independent themselves. So these
        # are drawn, and a bit is 1 where they change: no cumulative sum is needed.
        targets = sampling.integers(sampling.words(key, self.sequence_length), 2)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), targets[:-1]])
        inputs, weights = targets ^ before, base.all_count(targets)
        if self.has_start:
            inputs = inputs.at[1].set(targets[1]).at[0].set(2)
            targets, weights = targets.at[0].set(0), weights.at[0].set(0)
        return base.Example(inputs, targets, weights)
