"""Which axis of which array of attention is shared along which axis of a mesh.

`B...` batch axes, T query positions, S key positions, H query heads, G key heads, K
query/key size and V value size per head.
"""

from typing import Any

import jax

from mha_haiku import masks
from mha_haiku.attention.inputs import Inputs, Nonfinite

Array = jax.Array
Spec = jax.sharding.PartitionSpec
AXES = ("data", "heads", "sequence")


def rows(batch_ndim: int) -> Spec:
    """Returns how `[B..., T, H, K]` is shared, and `[B..., S, G, V]`."""
    return Spec(*_batch(batch_ndim), "sequence", "heads")


def logsumexp(batch_ndim: int) -> Spec:
    """Returns how `[B..., H, T]` is shared."""
    return Spec(*_batch(batch_ndim), "heads", "sequence")


def positions(batch_ndim: int) -> Spec:
    """Returns how `[B..., T]` is shared."""
    return Spec(*_batch(batch_ndim), "sequence")


def of_inputs(inputs: Inputs) -> Inputs:
    """Returns how all inputs of attention are shared."""
    batch_shape, num_heads = inputs.map_shape[:-3], inputs.map_shape[-3]
    own = rows(len(batch_shape))
    return Inputs(
        own,
        own,
        own,
        aligned(inputs.bias, batch_shape, num_heads),
        aligned(inputs.score, batch_shape, num_heads),
        of_mask(inputs.mask, batch_shape, num_heads),
        None if inputs.nonfinite is None else Nonfinite(own, own),
        None if inputs.rng is None else Spec(),
    )


def aligned(tree: Any, batch_shape: tuple[int, ...], num_heads: int) -> Any:
    """Returns how arrays `[B..., H, ...]` are shared, whose axes may have size 1."""

    def spec(x):
        axes = [None] * x.ndim
        _share_batch(axes, x, batch_shape)
        if x.shape[len(batch_shape)] == num_heads > 1:
            axes[len(batch_shape)] = "heads"
        return Spec(*axes)

    return jax.tree.map(spec, tree)


def of_mask(mask: masks.Mask, batch_shape: tuple[int, ...], num_heads: int) -> Any:
    """Returns how the arrays of a mask are shared; positions are not."""

    def spec(x):
        axes = [None] * x.ndim
        _share_batch(axes, x, batch_shape)
        at = len(batch_shape)
        if x.ndim == at + 3 and x.shape[at] == num_heads > 1:  # [B..., H, T, S]
            axes[at] = "heads"
        return Spec(*axes)

    return jax.tree.map(spec, mask)


def unshared(spec: Spec) -> tuple[str, ...]:
    """Returns the axes of the mesh along which an array of this spec is everywhere."""
    return tuple(axis for axis in AXES if axis not in spec)


def with_own_key(inputs: Inputs, mesh: jax.sharding.Mesh) -> Inputs:
    """Returns the inputs with a dropout key of this device's own, in `shard_map`."""
    if inputs.rng is None:
        return inputs
    index = 0
    for axis in AXES:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return inputs._replace(rng=jax.random.fold_in(inputs.rng, index))


def check(inputs: Inputs, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError where the axes of a mesh do not divide those of the inputs."""
    *batch_shape, num_heads, num_queries, num_keys = inputs.map_shape
    sizes = [("data", "the first batch axis", batch_shape[0] if batch_shape else 1)]
    sizes += [
        ("heads", "the heads H", num_heads),
        ("heads", "the key heads G", inputs.key.shape[-2]),
        ("sequence", "the queries T", num_queries),
        ("sequence", "the keys S", num_keys),
    ]
    for axis, what, size in sizes:
        if size % mesh.shape[axis] or not size:
            raise ValueError(
                f"the axis {axis!r} of the mesh, of {mesh.shape[axis]}, must divide "
                f"{what}, got {size}."
            )


def _batch(batch_ndim):
    return ("data", *(None,) * (batch_ndim - 1)) if batch_ndim else ()


def _share_batch(axes, x, batch_shape):
    if batch_shape and x.ndim and x.shape[0] == batch_shape[0] > 1:
        axes[0] = "data"
