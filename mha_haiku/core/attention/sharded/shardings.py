"""The sharding of the arrays of attention along the axes of a mesh.

Devices that share a sequence form a ring. A device keeps its queries; keys travel
around the ring together with their sums.

Source: Liu et al. 2023 (ring attention), https://arxiv.org/abs/2310.01889.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from mha_haiku.core.attention.inputs import Inputs, Nonfinite, Weighting

Spec = jax.sharding.PartitionSpec
AnySpec = Any  # a `Spec`, in the place of an array in a pytree
AXIS = "sequence"  # of the ring
AXES = ("data", "heads", AXIS)
# From the numbers of two parts of the sequence, of queries and of keys, their arrays,
# and the sums so far (per query, per key, per device), to the new sums.
Meet = Callable[..., tuple[Any, Any, Any]]
_SHARED = {"B": "data", "H": "heads"}  # by the letters of `Mask.axes`


def rows(batch_ndim: int) -> AnySpec:
    """Returns the sharding of `[B..., T, H, K]` and of `[B..., S, G, V]`."""
    return Spec(*_batch(batch_ndim), "sequence", "heads")


def logsumexp(batch_ndim: int) -> AnySpec:
    """Returns the sharding of `[B..., H, T]`."""
    return Spec(*_batch(batch_ndim), "heads", "sequence")


def input_specs(inputs: Inputs) -> Inputs:
    """Returns the sharding of all inputs of attention."""
    vectors = rows(inputs.query.ndim - 3)
    return Inputs(
        vectors,
        vectors,
        vectors,
        weighting_specs(inputs.weighting),
        None if inputs.nonfinite is None else Nonfinite(vectors, vectors),
        jax.tree.map(lambda _: Spec(), inputs.rng),
    )


def weighting_specs(weighting: Weighting) -> Weighting:
    """Returns the sharding of mask, bias and score: by batch and heads only."""

    def spec(letters: str, x: Array) -> Spec:
        sizes = zip(letters, x.shape, strict=True)
        return Spec(*(_SHARED.get(letter) if n > 1 else None for letter, n in sizes))

    def specs(part: Any) -> Any:
        return None if part is None else jax.tree.map(spec, part.axes(), part)

    mask, bias, score = map(specs, weighting[:3])
    origin = jax.tree.map(lambda _: Spec(), weighting.origin)
    return Weighting(mask, bias, score, origin=origin)


def unshared(spec: Spec) -> tuple[str, ...]:
    """Lists the mesh axes along which an array of this spec is replicated."""
    return tuple(axis for axis in AXES if axis not in spec)


def with_own_key(inputs: Inputs, mesh: jax.sharding.Mesh) -> Inputs:
    """Gives the inputs a separate dropout key on each device, in `shard_map`."""
    if inputs.rng is None:
        return inputs
    index = 0
    for axis in AXES:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return inputs._replace(rng=jax.random.fold_in(inputs.rng, index))


def check(inputs: Inputs, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if the axes of a mesh do not divide the axes of the inputs."""
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
                f"the axis {axis!r} of the mesh, of size {mesh.shape[axis]}, must "
                f"divide {what}, got {size}."
            )


def _batch(batch_ndim: int) -> tuple[str | None, ...]:
    return ("data", *(None,) * (batch_ndim - 1)) if batch_ndim else ()


# --- The ring


def around(size: int, meet: Meet, rows: Any, keys: Any, sums: tuple) -> tuple:
    """Passes keys around a ring of devices until all queries have met them all.

    It is called inside `shard_map`, on `size` devices. `meet` adds the contribution of
    the parts of two devices, and gets their numbers. Keys and their sums travel, and
    end where they began.
    """
    index = lax.axis_index(AXIS)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def passed_on(tree: Any) -> Any:
        if size == 1:
            return tree
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, to_next), tree)

    def met(step: int | Array, keys: Any, sums: tuple) -> tuple:
        return meet((index, (index - step) % size), rows, keys, *sums)

    def step(i: int | Array, carry: tuple) -> tuple:
        keys, sums = carry
        coming = passed_on(keys)  # sent first, to travel while these are used
        row_sums, key_sums, device_sums = met(i, keys, sums)
        return coming, (row_sums, passed_on(key_sums), device_sums)

    keys, sums = lax.fori_loop(0, size - 1, step, (keys, sums))
    row_sums, key_sums, device_sums = met(size - 1, keys, sums)
    return row_sums, passed_on(key_sums), device_sums
