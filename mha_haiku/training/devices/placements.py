"""Placements: how devices divide a batch, a state and the programs that run on them.

B batch, T positions, D model width, H heads, F hidden units. `Replicas` have the whole
model on every device. `Sharded` has a mesh: its axis `data` divides the
batch, `heads` heads and hidden units, `sequence` positions; the compiler derives the
shardings of all arrays from parameters and examples.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, https://arxiv.org/abs/1909.08053;
parameters divided over `data`: Rajbhandari et al. 2020 (ZeRO), section 5,
https://arxiv.org/abs/1910.02054.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import attention
from mha_haiku.core.modules import anatomy
from mha_haiku.training import tasks

_Spec = jax.sharding.PartitionSpec
_SHARED = (anatomy.HEADS, anatomy.KEY_VALUE_HEADS, anatomy.UNITS)  # over `heads`
_AXIS = "devices"


class Replicas:
    """Devices that divide each batch, each with the whole model.

    Programs are `jax.pmap`ped over the axis `_AXIS`. Arrays on devices have a leading
    axis, one entry per device, so that they can be donated to the next call.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    ):
        self.devices = tuple(devices)

    def implementation(self, name: str) -> str:
        """Returns the argument `implementation` of `attend` for one of its names."""
        return name

    def put(self, tree: Any) -> Any:
        """Puts host arrays on every device, as arrays `[devices, ...]`; see `fetch`."""
        mesh = jax.sharding.Mesh(np.array(self.devices), (_AXIS,))
        sharding = jax.sharding.NamedSharding(mesh, _Spec(_AXIS))

        def put(leaf: jax.typing.ArrayLike) -> jax.Array:
            row = np.asarray(leaf)[None]
            shape = (len(self.devices), *row.shape[1:])
            return jax.make_array_from_callback(shape, sharding, lambda _: row)

        return jax.tree.map(put, tree)

    put_state = put

    def initial_state(self, function: Callable, seed: np.uint32) -> Any:
        """Puts `function(seed)`, a state, on every device."""
        return self.put(jax.jit(function)(seed))

    def fetch(self, tree: Any) -> Any:
        """Fetches arrays from `put`, or from a program, as host arrays."""
        # Of one device of this process only; indexing `x[0]` would gather from all.
        # Copies outlive the donation of the originals.
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
            axis_name=_AXIS,
            in_axes=(0, 0, *(None,) * num_scalars),
            devices=self.devices,
            donate_argnums=0 if returns_state else (),
        )

    def batch(self, batch_size: int, make: Callable[[jax.Array], Any]) -> Any:
        """Makes this device's part of `make(indices)`; only inside a program.

        An index of the global batch `[N]` int32 is on exactly one device.
        """
        size = batch_size // len(self.devices)
        first = jax.lax.axis_index(_AXIS) * size
        return make((first + jnp.arange(size)).astype(jnp.int32))

    def own_key(self, key: jax.Array) -> jax.Array:
        """Derives a key for this device's random numbers; only inside a program."""
        return jax.random.fold_in(key, jax.lax.axis_index(_AXIS))

    def total(self, tree: Any) -> Any:
        """Sums every leaf over the parts of the batch; only inside a program."""
        # XLA keeps a collective of one device, and that would keep the gradient and its
        # update from being fused.
        return tree if len(self.devices) == 1 else jax.lax.psum(tree, _AXIS)


def make_mesh(
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    *,
    heads: int,
    sequence: int,
    data: int = -1,
) -> jax.sharding.Mesh:
    """Makes the mesh; `heads`, which communicates most, has neighboring devices.

    With -1, `data` is the number of devices that the other two leave.

    Raises:
      ValueError: If the sizes do not multiply to the number of devices.

    Example:
      >>> mesh = mh.devices.make_mesh(jax.devices()[:4], heads=2, sequence=1)
      >>> dict(mesh.shape)
      {'data': 2, 'sequence': 1, 'heads': 2}
    """
    grid = np.array(devices).reshape(data, sequence, heads)
    return jax.sharding.Mesh(grid, ("data", "sequence", "heads"))


class Sharded:
    """A mesh as a placement; `Replicas` documents the common methods.

    With `shard_parameters` parameters and the optimizer's state are divided over
    `data`, and gathered where they are used.

    Example:
      >>> mesh = mh.devices.make_mesh(jax.devices()[:2], heads=2, sequence=1)
      >>> put = mh.devices.Sharded(mesh).put_state(params)
      >>> tuple(put["encoder/layer_0/attention/query"]["w"].sharding.spec)
      (None, 'heads')
    """

    def __init__(self, mesh: jax.sharding.Mesh, *, shard_parameters: bool = False):
        self.mesh = mesh
        self.devices = tuple(mesh.devices.flat)
        self._shard_parameters = shard_parameters

    def implementation(self, name: str) -> attention.Sharded:
        """Returns the argument `implementation` of `attend` for one of its names."""
        return attention.Sharded(self.mesh, name)

    def put(self, tree: Any) -> Any:
        """Puts host arrays on every device, whole; see `fetch`."""
        return jax.tree.map(functools.partial(_put, sharding=self._everywhere), tree)

    def put_state(self, tree: Any) -> Any:
        """Puts parameters, or a training state, each leaf with its `sharding_of`."""
        return jax.tree.map(_put, tree, self._shardings(tree))

    def initial_state(self, function: Callable, seed: np.uint32) -> Any:
        """Puts `function(seed)`, a state, on the devices, as `put_state` does."""
        shardings = self._shardings(jax.eval_shape(function, seed))
        return jax.jit(function, out_shardings=shardings)(seed)

    def sharding_of(
        self, path: tuple, shape: tuple[int, ...]
    ) -> jax.sharding.NamedSharding:
        """Picks the sharding of a parameter, or of the optimizer's moments of it.

        The last two keys of its path in the tree are its module and its name.
        """
        axes: list[str | None] = [None] * len(shape)
        module, name = ["", "", *(str(getattr(key, "key", key)) for key in path)][-2:]
        axis = anatomy.axis_of(module, name)
        heads, data = self.mesh.shape["heads"], self.mesh.shape["data"]
        if axis is not None and axis.holds in _SHARED and len(shape) >= -axis.place:
            if shape[axis.place] % heads == 0:
                axes[axis.place] = "heads"
        if self._shard_parameters:
            sizes = enumerate(shape)
            free = [i for i, x in sizes if axes[i] is None and x and x % data == 0]
            if free:
                axes[max(free, key=lambda i: shape[i])] = "data"
        return jax.sharding.NamedSharding(self.mesh, _Spec(*axes))

    def fetch(self, tree: Any) -> Any:
        """Gathers whole host arrays; all processes have to call it."""
        if not all(x.is_fully_replicated for x in jax.tree.leaves(tree)):
            tree = jax.jit(lambda x: x, out_shardings=self._everywhere)(tree)
        return jax.tree.map(lambda x: np.array(x.addressable_shards[0].data), tree)

    def program(
        self, function: Callable, *, num_scalars: int, returns_state: bool
    ) -> Any:
        """Compiles a function of arrays from `put` and `put_state`."""
        if not returns_state:
            return jax.jit(function, out_shardings=self._everywhere)

        def placed(*arguments: Any):
            state, others = function(*arguments)
            # A state stays where it is.
            state = jax.lax.with_sharding_constraint(state, self._shardings(state))
            return state, jax.lax.with_sharding_constraint(others, self._everywhere)

        return jax.jit(placed, donate_argnums=0)

    def batch(
        self, batch_size: int, make: Callable[[jax.Array], tasks.Example]
    ) -> tasks.Example:
        """Makes a batch that the devices divide; only inside a program."""
        return self.spread(make(jnp.arange(batch_size, dtype=jnp.int32)))

    def spread(self, examples: tasks.Example) -> tasks.Example:
        """Divides a batch by examples, and by positions where the mesh can."""
        shared = {"B": "data", "T": "sequence"}

        def constrain(letters: str, x: jax.Array) -> jax.Array:
            axes = [shared.get(letter) for letter in letters]
            for i, (axis, size) in enumerate(zip(axes, x.shape, strict=True)):
                if axis == "sequence" and size % self.mesh.shape[axis]:
                    axes[i] = None
            sharding = jax.sharding.NamedSharding(self.mesh, _Spec(*axes))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, examples.axes(), examples)

    def own_key(self, key: jax.Array) -> jax.Array:
        """Returns the key for the whole batch's random numbers."""
        return key  # a program of a mesh draws for the whole batch

    def total(self, tree: Any) -> Any:
        """Returns the sums of every leaf over the batch."""
        return tree  # sums are over the whole batch already

    def _shardings(self, tree: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: self.sharding_of(path, np.shape(leaf)), tree
        )

    @property
    def _everywhere(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, _Spec())


def _put(leaf: jax.typing.ArrayLike, sharding: jax.sharding.NamedSharding) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda at: leaf[at])
