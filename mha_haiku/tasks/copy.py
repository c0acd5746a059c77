"""Give the sequence back as it came."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax

from mha_haiku import checks
from mha_haiku.tasks import sampling
from mha_haiku.tasks import task as task_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(task_lib.Task):
    """The target at position t is the token at position t.

    Tokens are independent and uniform. Example, T = 5 and 10 tokens:

        inputs   3 1 4 1 5
        targets  3 1 4 1 5
        weights  1 1 1 1 1

    Metric: accuracy over all positions. Chance: one token in `num_tokens`, and its
    logarithm in nats. A head that solves it attends along the diagonal; a residual
    connection alone solves it too.

    Attributes:
      sequence_length: T.
      num_tokens: Number of different tokens, 0 to num_tokens - 1; also the classes.
    """

    name: ClassVar[str] = "copy"
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
        """Chance level: every target is uniform over the tokens."""
        return {"accuracy": 1 / self.num_tokens, "loss": math.log(self.num_tokens)}

    def example(self, key: jax.Array, data: Any) -> task_lib.Example:
        """Returns one example; `data` is unused."""
        del data
        random = sampling.words(key, self.sequence_length)
        inputs = sampling.integers(random, self.num_tokens)
        return task_lib.Example(inputs, inputs, task_lib.all_count(inputs))
