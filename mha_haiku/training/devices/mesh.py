"""A mesh of devices, which also divides heads, hidden units and positions.

B batch, T positions, D model width, H heads, F hidden units. Axes of the mesh: `data`
divides the batch, `heads` heads and hidden units, `sequence` positions. Programs are
`jax.jit`ted; the compiler derives the shardings of all arrays from the shardings of
parameters and examples, and attention is divided by `attention.Sharded`.

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


def make_mesh(
    devices: Sequence[jax.Device], *, data: int, heads: int, sequence: int
) -> jax.sharding.Mesh:
    """Makes the mesh; `heads`, which communicates most, has neighbouring devices."""
    grid = np.array(devices).reshape(data, sequence, heads)
    return jax.sharding.Mesh(grid, ("data", "sequence", "heads"))


class Sharded:
    """A mesh as a placement; `replicas.Replicas` documents the common methods."""

    def __init__(self, mesh: jax.sharding.Mesh, *, shard_parameters: bool = False):
        """Takes a mesh of `make_mesh`.

        With `shard_parameters` parameters and the optimizer's state are divided over
        `data`, and gathered where they are used.
        """
        self.mesh = mesh
        self.devices = tuple(mesh.devices.flat)
        self._shard_parameters = shard_parameters

    @property
    def batch_parts(self) -> int:
        return self.mesh.shape["data"]

    def implementation(self, name: str) -> attention.Sharded:
        return attention.Sharded(self.mesh, name)

    def put(self, tree: Any) -> Any:
        """Puts host arrays on every device."""
        return jax.tree.map(functools.partial(_put, sharding=self._everywhere), tree)

    def put_state(self, tree: Any) -> Any:
        """Puts parameters, or a training state, each leaf with its `sharding_of`."""
        return jax.tree.map_with_path(
            lambda path, leaf: _put(leaf, self.sharding_of(path, np.shape(leaf))), tree
        )

    def initial_state(self, function: Callable, seed: np.uint32) -> Any:
        abstract = jax.eval_shape(function, seed)
        shardings = jax.tree.map_with_path(
            lambda path, x: self.sharding_of(path, x.shape), abstract
        )
        return jax.jit(function, out_shardings=shardings)(seed)

    def sharding_of(
        self, path: tuple, shape: tuple[int, ...]
    ) -> jax.sharding.NamedSharding:
        """Returns the sharding of a parameter, or of the optimizer's moments of it.

        The last two keys of its path in a tree are its module and its name.
        """
        axes = [None] * len(shape)
        module, name = ["", "", *(str(getattr(key, "key", key)) for key in path)][-2:]
        axis = anatomy.axis_of(module, name)
        heads, data = self.mesh.shape["heads"], self.mesh.shape["data"]
        if axis is not None and axis.holds in _SHARED and len(shape) >= -axis.place:
            if shape[axis.place] % heads == 0:
                axes[axis.place] = "heads"
        if self._shard_parameters:
            free = [
                i
                for i, size in enumerate(shape)
                if axes[i] is None and size and size % data == 0
            ]
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
    ) -> "_Program":
        return _Program(function, self._everywhere, returns_state)

    def batch(
        self, batch_size: int, make: Callable[[jax.Array], tasks.Example]
    ) -> tasks.Example:
        """Makes the whole batch, `make(indices)`, divided over the mesh."""
        examples = make(jnp.arange(batch_size, dtype=jnp.int32))
        return self.spread(examples)

    def spread(self, examples: tasks.Example) -> tasks.Example:
        """Divides a batch by examples, and by positions where the mesh can."""
        shared = {"B": "data", "T": "sequence"}

        def constrain(letters, x):
            axes = [shared.get(letter) for letter in letters]
            for i, (axis, size) in enumerate(zip(axes, x.shape, strict=True)):
                if axis == "sequence" and size % self.mesh.shape[axis]:
                    axes[i] = None
            sharding = jax.sharding.NamedSharding(self.mesh, _Spec(*axes))
            return jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, examples.axes(), examples)

    def gathered(self, tree: Any) -> Any:
        """Gathers arrays on every device; inside a program."""
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, self._everywhere), tree
        )

    def own_key(self, key: jax.Array) -> jax.Array:
        """Returns the key unchanged: a program of a mesh draws for the whole batch."""
        return key

    def total(self, tree: Any) -> Any:
        """Returns the tree unchanged: sums are over the whole batch already."""
        return tree

    @property
    def _everywhere(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, _Spec())


class _Program:
    """A jitted function whose returned state has the shardings of the given one."""

    def __init__(self, function, everywhere, returns_state):
        self._function = function
        self._everywhere = everywhere
        self._returns_state = returns_state

    def __call__(self, *arguments):
        return self._jitted(*arguments)(*arguments)

    def lower(self, *arguments):
        return self._jitted(*arguments).lower(*arguments)

    def _jitted(self, state, *others):
        if not self._returns_state:
            return jax.jit(self._function, out_shardings=self._everywhere)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(
            self._function,
            out_shardings=(shardings, self._everywhere),
            donate_argnums=0,
        )


def _put(leaf, sharding):
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda at: leaf[at])
