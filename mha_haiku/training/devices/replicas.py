"""Data parallelism: every device has the whole model, or several of them.

Programs are `jax.pmap`ped over the axis `AXIS`. Arrays on devices have a
leading axis, one entry per device, so that they can be donated to the next call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.training.devices.mesh import Sharded

AXIS = "devices"


class Replicas:
    """Devices that divide each batch; one of two placements, see `mesh.Sharded`."""

    def __init__(self, devices: Sequence[jax.Device]):
        """Takes the devices, of one or of several processes."""
        self.devices = tuple(devices)

    @property
    def batch_parts(self) -> int:
        """Into how many equal parts a batch is divided."""
        return len(self.devices)

    def implementation(self, name: str) -> str:
        """Returns the argument `implementation` of `attend` for one of its names."""
        return name

    def put(self, tree: Any) -> Any:
        """Puts host arrays on every device, as arrays `[devices, ...]`; see `fetch`."""
        mesh = jax.sharding.Mesh(np.array(self.devices), (AXIS,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

        def put(leaf):
            row = np.asarray(leaf)[None]
            shape = (len(self.devices), *row.shape[1:])
            return jax.make_array_from_callback(shape, sharding, lambda _: row)

        return jax.tree.map(put, tree)

    put_state = put

    def initial_state(self, function: Callable, seed: np.uint32) -> Any:
        """Returns `function(seed)`, a state, on every device."""
        return self.put(jax.jit(function)(seed))

    def fetch(self, tree: Any) -> Any:
        """Fetches arrays from `put`, or from a program, as host arrays.

        Reads one device of this process only; indexing `x[0]` would gather from all.
        The arrays are copies, so they outlive the donation of the originals.
        """
        return jax.tree.map(lambda x: np.array(x.addressable_shards[0].data[0]), tree)

    def program(
        self, function: Callable, *, num_scalars: int, returns_state: bool
    ) -> Any:
        """Compiles `function(state, data, *scalars)` to a program, which has `lower`.

        State and data are trees from `put`. The function returns a tree, or with
        `returns_state` (the state is donated then) a state and a tree. It may call
        `batch`, `own_key` and `total`.
        """
        return jax.pmap(
            function,
            axis_name=AXIS,
            in_axes=(0, 0, *(None,) * num_scalars),
            devices=self.devices,
            donate_argnums=0 if returns_state else (),
        )

    def batch(self, batch_size: int, make: Callable[[jax.Array], Any]) -> Any:
        """Returns this device's part of `make(indices)`; only inside a program.

        `make` makes examples from their indices `[N]` int32 in the global batch, of
        which every one occurs on exactly one device.
        """
        size, rest = divmod(batch_size, len(self.devices))
        if rest:
            raise ValueError(
                f"batch_size must be a multiple of {len(self.devices)} devices, got "
                f"{batch_size}."
            )
        first = jax.lax.axis_index(AXIS) * size
        return make((first + jnp.arange(size)).astype(jnp.int32))

    def own_key(self, key: jax.Array) -> jax.Array:
        """Returns a key for this device's own random numbers; only inside a program."""
        return jax.random.fold_in(key, jax.lax.axis_index(AXIS))

    def total(self, tree: Any) -> Any:
        """Sums every leaf over the parts of the batch; only inside a program.

        A single device's sum is the tree itself: XLA keeps a collective of one, and
        that would keep the gradient and its update from being fused.
        """
        return tree if len(self.devices) == 1 else jax.lax.psum(tree, AXIS)


class Together:
    """M models of one shape, each with its seed, in each program of a placement.

    The states of several have an axis of M models, over which `jax.vmap` runs each
    program; the data are the same for all. Where a `while_loop` ends sooner for one
    model, its state is kept while the others train: a model that is told to stop at the
    step it is at takes no step, and none of another's numbers, NaN included, reach it.
    One model has no such axis, and runs the placement's own programs.

    Attributes:
      placement: The placement that programs are made for.
    """

    def __init__(self, placement: Replicas | Sharded, count: int):
        """Takes the placement of each, `Replicas` of several models, and M."""
        self.placement = placement if count == 1 else _Vectorised(placement.devices)
        self._count = count

    def put_states(self, states: Sequence[Any]) -> Any:
        """Puts the states of all models, trees of host arrays, on the devices."""
        return self.placement.put_state(self.joined(states))

    def fetch(self, tree: Any) -> list[Any]:
        """Fetches what a program returned for each model, as host arrays."""
        tree = self.placement.fetch(tree)
        if self._count == 1:
            return [tree]
        return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(self._count)]

    def joined(self, trees: Sequence[Any]) -> Any:
        """Joins trees of numbers, one per model, to an argument of a program."""
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
