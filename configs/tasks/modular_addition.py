"""Add two numbers modulo p."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields
from mha_haiku.training.tasks import base, sampling

_LARGEST_MODULUS = 1024  # a table of a million entries
_SPLIT_SEED = 0  # the split is part of the task: every run has the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModularAddition(base.UniformTask):
    """The inputs are `a + b =`; the target at the last position is a + b mod p.

    The p * p sums are split into a training and a held-out part, the same for every
    seed; a + b and b + a are in the same part, so no held-out sum is seen in training.
    Tokens 0 to p - 1 are numbers, p is "+" and p + 1 is "="; the classes are numbers.
    Example, p = 7:

        inputs   3 + 6 =
        targets  . . . 2
        weights  0 0 0 1

    Metric: accuracy at the last position. Chance: accuracy 1 / p, loss log p nats;
    every result is equally frequent in the whole table.

    Source: Power et al. 2022, https://arxiv.org/abs/2201.02177.
    """

    name: ClassVar[str] = "modular_addition"
    sequence_length: ClassVar[int] = 4
    modulus: int = fields.field(
        47, "p: numbers are 0 to p - 1", fields.integer(2, _LARGEST_MODULUS)
    )
    train_fraction: float = fields.field(
        0.8,
        "share of the addition table to train on; the rest is held out",
        checks.fraction,
    )

    def __post_init__(self):
        super().__post_init__()
        train, held_out = map(len, self._split)
        fraction = self.train_fraction
        base.check_parts("train_fraction", fraction, train, held_out, "sums")

    @property
    def num_tokens(self) -> int:
        return self.modulus + 2

    @property
    def num_classes(self) -> int:
        return self.modulus

    def token_label(self, token: int) -> str:
        signs = {self.modulus: "+", self.modulus + 1: "="}
        return signs.get(token, str(token))

    def example(self, key: jax.Array, data: Any) -> base.Example:
        a, b = sampling.row(key, data)
        inputs = jnp.stack([a, jnp.int32(self.modulus), b, jnp.int32(self.modulus + 1)])
        at_end = jnp.arange(self.sequence_length) == self.sequence_length - 1
        targets = jnp.where(at_end, (a + b) % self.modulus, 0).astype(jnp.int32)
        return base.Example(inputs, targets, at_end.astype(jnp.float32))

    @functools.cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.triu_indices(self.modulus)
        order = np.random.RandomState(_SPLIT_SEED).permutation(len(low))
        num_train = round(self.train_fraction * len(low))

        def both_ways(chosen: np.ndarray) -> np.ndarray:
            pairs = np.stack([low[chosen], high[chosen]], axis=1)
            mirrored = pairs[pairs[:, 0] != pairs[:, 1], ::-1]
            return np.concatenate([pairs, mirrored]).astype(np.int32)

        return both_ways(order[:num_train]), both_ways(order[num_train:])
