"""One model or several in each program of a placement.

Dimensions: M models, each with a seed of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.training.devices.mesh import Sharded
from mha_haiku.training.devices.replicas import Replicas


class Together:
    """M models of one shape in each program.

    The states of several have an axis of M models, over which `jax.vmap` runs each
    program; the data are the same for all. Where a `while_loop` ends sooner for one
    model, its state is kept while the others go on: a model that is told to stop at the
    step it is at takes no step, and none of another's numbers, NaN included, reach it.
    One model has no such axis, and runs the placement's own programs.

    Attributes:
      placement: The placement that programs are made for.
    """

    def __init__(self, placement: Replicas | Sharded, count: int):
        """Takes the placement of each, `Replicas` of several models, and M."""
        self.placement = placement if count == 1 else _Vectorised(placement.devices)
        self._count = count

    def initial_states(
        self, function: Callable[[np.uint32], Any], seeds: Sequence[np.uint32]
    ) -> Any:
        """Returns the states `function(seed)` on the devices.

        Each has the bits that it has alone.
        """
        if self._count == 1:
            return self.placement.initial_state(function, *seeds)
        alone = jax.jit(function)
        return self.put_states([jax.device_get(alone(seed)) for seed in seeds])

    def put_states(self, states: Sequence[Any]) -> Any:
        """Puts the states of all models, trees of host arrays, on the devices."""
        return self.placement.put_state(self.joined(states))

    def fetch(self, tree: Any) -> list[Any]:
        """Returns what a program returned for each model, as host arrays."""
        tree = self.placement.fetch(tree)
        if self._count == 1:
            return [tree]
        return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(self._count)]

    def joined(self, trees: Sequence[Any]) -> Any:
        """Returns trees of numbers, one of each model, as an argument of a program."""
        if self._count == 1:
            return trees[0]
        return jax.tree.map(lambda *x: np.stack(x), *trees)


class _Vectorised(Replicas):
    """Replicas whose programs are of M models: all but the data has an axis of them."""

    def program(
        self, function: Callable, *, num_scalars: int, returns_state: bool
    ) -> Any:
        axes = (0, None, *(0,) * num_scalars)
        return super().program(
            jax.vmap(function, in_axes=axes),
            num_scalars=num_scalars,
            returns_state=returns_state,
        )
