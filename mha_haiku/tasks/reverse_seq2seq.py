"""Write the source sequence in reverse order, token by token."""

import dataclasses
from typing import ClassVar

import jax

from mha_haiku.tasks import uniform_sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReverseSeq2Seq(uniform_sequences.UniformSequencesTask):
    """The target is the source in reverse order.

    Tokens are independent and uniform, lengths are uniform, too. Example, with lengths
    from 2 to 6 and 10 tokens:

        inputs   3 1 4 5
        targets  5 4 1 3 <end> <end> <end>
        weights  1 1 1 1 1     0     0

    Metric: accuracy over the targets and the end token; exact match of all of them.
    Chance: see `uniform_sequences`. A cross head that solves it attends along the
    anti-diagonal, which begins where the source ends.
    """

    name: ClassVar[str] = "reverse_seq2seq"

    def places(self, position: jax.Array, length: jax.Array) -> jax.Array:
        """Returns the positions counted from the source's end."""
        return length - 1 - position
