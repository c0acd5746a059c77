"""Reverse a sequence, with an encoder and a decoder."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import fields
from mha_haiku.training.tasks import base, sampling, sequence_to_sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReverseSeq2Seq(sequence_to_sequence.SequenceToSequence):
    """The target is the source in reverse order.

    Lengths are uniform, tokens independent and uniform. Example with lengths from 2 to
    6 and 10 tokens:

        inputs   3 1 4 5
        targets  5 4 1 3 <end> <end> <end>
        weights  1 1 1 1 1     0     0

    Metric: accuracy over the targets and the end token; exact match of all of them. A
    cross head that solves it attends along the anti-diagonal, which begins where the
    source ends.
    """

    name: ClassVar[str] = "reverse_seq2seq"
    min_length: int = fields.field(
        4, "tokens of the shortest source", sampling.count(1)
    )
    max_length: int = fields.field(
        16, "tokens of the longest source", sampling.count(1)
    )
    num_tokens: int = fields.field(10, "number of different tokens", sampling.count(2))

    def __post_init__(self):
        super().__post_init__()
        if self.min_length > (most := self.max_length):
            raise ValueError(
                f"min_length must be at most max_length {most}, got {self.min_length}."
            )

    @property
    def sequence_length(self) -> int:
        return self.max_length

    @property
    def target_length(self) -> int:
        return self.max_length + 1

    @property
    def num_target_tokens(self) -> int:
        return self.num_tokens

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Chance level: the end has come by position t in a known share of examples.

        A position counts if the length is at least the position; then it is the end
        token for one of the remaining lengths, else any token.
        """
        from scipy import special  # imported late as it is slow

        position = np.arange(self.target_length)
        num_lengths = self.max_length - self.min_length + 1
        left = np.minimum(num_lengths, self.max_length - position + 1)
        end = np.where(position < self.min_length, 0, 1 / left)
        accuracy = np.maximum(end, (1 - end) / self.num_tokens)
        loss = (1 - end) * math.log(self.num_tokens)
        loss += special.entr(end) + special.entr(1 - end)
        return {
            "accuracy": float(np.average(accuracy, weights=left)),
            "loss": float(np.average(loss, weights=left)),
        }

    def example(self, key: jax.Array, data: Any) -> base.Example:
        random = sampling.words(key, self.max_length + 1)
        choices = self.max_length - self.min_length + 1
        length = self.min_length + sampling.integers(random[0], choices)
        source = sampling.integers(random[1:], self.num_tokens)
        places = length - 1 - jnp.arange(self.target_length)
        target = source[jnp.clip(places, 0, self.max_length - 1)]
        return self.pair(source, length, target, length)

    def alignments(self, example: base.Example) -> dict[str, np.ndarray]:
        assert example.lengths is not None  # as `pair` gives them
        length = int(example.lengths)
        targets, inputs = np.asarray(example.targets), np.asarray(example.inputs)
        aligned = np.zeros((self.target_length, self.sequence_length), bool)
        rows = np.arange(min(length, len(targets)))
        columns = length - 1 - rows
        aligned[rows, columns] = targets[rows] == inputs[columns]
        return {"aligned": aligned}
