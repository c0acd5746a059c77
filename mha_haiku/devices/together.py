"""One model or several in each program of a placement, with one face for both.

Dimensions: M models, each with a seed of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mha_haiku.devices.mesh import Sharded
from mha_haiku.devices.replicas import Replicas


class Alone:
    """One model, in the arrays and programs of a placement as they are.

    Attributes:
      placement: The placement that programs are made for.
    """

    def __init__(self, placement: Replicas | Sharded):
        """Takes the placement."""
        self.placement = placement

    def initial_states(
        self, function: Callable[[np.uint32], Any], seeds: Sequence[np.uint32]
    ) -> Any:
        """Returns the states `function(seed)` on the devices, of all models."""
        (seed,) = seeds
        return self.placement.initial_state(function, seed)

    def put_states(self, states: Sequence[Any]) -> Any:
        """Puts the states of all models, trees of host arrays, on the devices."""
        (state,) = states
        return self.placement.put_state(state)

    def fetch(self, tree: Any) -> list[Any]:
        """Returns what a program returned for each model, as host arrays."""
        return [self.placement.fetch(tree)]

    def scalars(self, values: Sequence[np.generic]) -> np.generic | np.ndarray:
        """Returns a number of each model as an argument of a program."""
        (value,) = values
        return value


class Together:
    """M models of one shape; documented at `Alone`, which has the same methods.

    States have an axis of M models, over which `jax.vmap` runs each program; the data
    are the same for all. Where a `while_loop` ends sooner for one model, its state is
    kept while the others go on: a model that is told to stop at the step it is at
    takes no step, and none of another's numbers, NaN included, reach it.
    """

    def __init__(self, placement: Replicas, count: int):
        """Takes the placement of each, and M."""
        self.placement = _Vectorised(placement.devices)
        self._count = count

    def initial_states(
        self, function: Callable[[np.uint32], Any], seeds: Sequence[np.uint32]
    ) -> Any:
        """See `Alone`; each state has the bits that it has alone."""
        alone = jax.jit(function)
        return self.put_states([jax.device_get(alone(seed)) for seed in seeds])

    def put_states(self, states: Sequence[Any]) -> Any:
        """See `Alone`."""
        stacked = jax.tree.map(lambda *x: np.stack(x), *states)
        return self.placement.put_state(stacked)

    def fetch(self, tree: Any) -> list[Any]:
        """See `Alone`."""
        leaves, structure = jax.tree.flatten(self.placement.fetch(tree))
        return [
            jax.tree.unflatten(structure, [x[i] for x in leaves])
            for i in range(self._count)
        ]

    def scalars(self, values: Sequence[np.generic]) -> np.generic | np.ndarray:
        """See `Alone`."""
        return np.stack(values)


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
