"""How devices divide a batch, a state and the programs that run on them.

B batch, T positions, D model width, H heads, F hidden units, M models. A mesh has the
axis `data`, which divides the batch, `heads` for heads and hidden units, and `sequence`
for positions; the compiler derives the shardings of all arrays from parameters and
examples. One device is a mesh as well.

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
    """Makes the mesh; `heads`, which communicates most, has neighbouring devices.

    Raises:
      ValueError: If the sizes do not multiply to the number of devices.
    """
    grid = np.array(devices).reshape(data, sequence, heads)
    return jax.sharding.Mesh(grid, ("data", "sequence", "heads"))


class Placement:
    """Where devices have a batch, a state and the programs that run on them.

    Whatever no axis of the mesh divides is on every device. With `shard_parameters`
    parameters and the optimizer's state are divided over `data`, and gathered where
    they are used.

    Programs can be of M models of one shape (`num_models`), each with its seed: states
    have an axis of them then, over which `jax.vmap` runs each program; the data are the
    same for all. Where a `while_loop` ends sooner for one model, its state is kept
    while the others train: a model that is told to stop at the step it is at takes no
    step, and none of another's numbers, NaN included, reach it.

    Raises:
      ValueError: If `heads * sequence` does not divide the number of devices.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        *,
        heads: int = 1,
        sequence: int = 1,
        shard_parameters: bool = False,
        num_models: int = 1,
    ):
        data = len(devices) // (heads * sequence)
        self.mesh = make_mesh(devices, data=data, heads=heads, sequence=sequence)
        self.devices = tuple(self.mesh.devices.flat)
        self._shard_parameters = shard_parameters
        self._num_models = num_models

    @property
    def batch_parts(self) -> int:
        """Into how many equal parts a batch is divided."""
        return self.mesh.shape["data"]

    def implementation(self, name: str) -> str | attention.Sharded:
        """Returns the argument `implementation` of `attend` for one of its names."""
        return name if self.mesh.size == 1 else attention.Sharded(self.mesh, name)

    def put(self, tree: Any) -> Any:
        """Puts host arrays on every device."""
        return jax.tree.map(functools.partial(_put, sharding=self._everywhere), tree)

    def put_state(self, tree: Any) -> Any:
        """Puts parameters, or a training state, each leaf with its `sharding_of`."""
        return jax.tree.map(_put, tree, self._shardings(tree))

    def initial_state(self, function: Callable, seed: np.uint32) -> Any:
        """Puts `function(seed)`, a state, where `put_state` would."""
        shardings = self._shardings(jax.eval_shape(function, seed))
        return jax.jit(function, out_shardings=shardings)(seed)

    def sharding_of(
        self, path: tuple, shape: tuple[int, ...]
    ) -> jax.sharding.NamedSharding:
        """Picks the sharding of a parameter, or of the optimizer's moments of it.

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

    def joined(self, trees: Sequence[Any]) -> Any:
        """Joins host trees, one for each model, to an argument of a program."""
        if self._num_models == 1:
            return trees[0]
        return jax.tree.map(lambda *x: np.stack(x), *trees)

    def fetch_each(self, tree: Any) -> list[Any]:
        """Fetches what a program returned for each model."""
        tree = self.fetch(tree)
        if self._num_models == 1:
            return [tree]
        indices = range(self._num_models)
        return [jax.tree.map(lambda x, i=i: x[i], tree) for i in indices]

    def program(
        self, function: Callable, *, num_scalars: int, returns_state: bool
    ) -> "_Program":
        """Compiles `function(state, data, *scalars)` to a program, which has `lower`.

        The function returns a tree, or with `returns_state` (the state is donated then)
        a state and a tree. It may call `batch`, `spread` and `gathered`.
        """
        if self._num_models > 1:
            function = jax.vmap(function, in_axes=(0, None, *(0,) * num_scalars))
        return _Program(function, self._everywhere, returns_state)

    def batch(
        self, batch_size: int, make: Callable[[jax.Array], tasks.Example]
    ) -> tasks.Example:
        """Makes a batch, `make` of the indices `[B]` int32, divided; in a program.

        Raises:
          ValueError: If `batch_parts` does not divide `batch_size`.
        """
        if batch_size % self.batch_parts:
            raise ValueError(
                f"batch_size must be a multiple of {self.batch_parts} devices, got "
                f"{batch_size}."
            )
        return self.spread(make(jnp.arange(batch_size, dtype=jnp.int32)))

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

    def _shardings(self, tree) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: self.sharding_of(path, np.shape(leaf)), tree
        )

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
        shardings = jax.tree.map(lambda x: x.sharding, state), self._everywhere
        return jax.jit(self._function, out_shardings=shardings, donate_argnums=0)


def _put(leaf, sharding):
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda at: leaf[at])
