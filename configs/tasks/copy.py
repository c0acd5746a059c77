"""Copy a sequence."""

import dataclasses
from typing import ClassVar

import jax

from mha_haiku.training.tasks import uniform_tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(uniform_tasks.UniformTokensTask):
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
