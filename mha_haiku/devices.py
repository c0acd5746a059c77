"""Where arrays live: one copy per device, and each device's part of a batch.

The training programs are `jax.pmap`ped over the axis `AXIS`. A replicated tree is
stored with a leading axis, one entry per device, so that it can be donated to the next
dispatch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXIS = "devices"


def local(count: int | None = None) -> list[jax.Device]:
    """Returns this process's first `count` devices (None: all of them)."""
    return jax.local_devices()[:count]


def replicate(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Puts a copy of every leaf on every device.

    Args:
      tree: Arrays of any shape `[...]`.
      devices: The devices of the `pmap` that will take the result.

    Returns:
      The same tree of arrays `[len(devices), ...]`, one row on each device.
    """
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def put(leaf):
        row = np.asarray(leaf)[None]
        shape = (len(devices), *row.shape[1:])
        return jax.make_array_from_callback(shape, sharding, lambda _: row)

    return jax.tree.map(put, tree)


def unreplicate(tree: Any) -> Any:
    """Returns the first device's copy of every leaf, as host arrays of their own.

    Reads that device only: indexing `x[0]` would gather from all of them. The arrays
    are copies, so they outlive the donation of the originals.
    """
    return jax.tree.map(lambda x: np.array(x.addressable_shards[0].data[0]), tree)


def part_of_batch(batch_size: int, num_devices: int) -> jax.Array:
    """Returns the indices, within the global batch, of the examples of this device.

    Only inside a function that is `pmap`ped over `AXIS`.

    Args:
      batch_size: B, the examples of all devices together; a multiple of `num_devices`.
      num_devices: How many devices share the batch.

    Returns:
      `[B / num_devices]` int32: every index of 0..B-1 occurs on exactly one device.
    """
    size, rest = divmod(batch_size, num_devices)
    if rest:
        raise ValueError(
            f"batch_size must be a multiple of {num_devices} devices, got {batch_size}."
        )
    first = jax.lax.axis_index(AXIS) * size
    return (first + jnp.arange(size)).astype(jnp.int32)


def total(tree: Any, num_devices: int) -> Any:
    """Sums every leaf over the devices; only inside a function `pmap`ped over `AXIS`.

    A single device's sum is the tree itself: XLA keeps a collective of one, and that
    would keep the gradient and its update from being fused.
    """
    return tree if num_devices == 1 else jax.lax.psum(tree, AXIS)
