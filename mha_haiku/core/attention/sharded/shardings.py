"""The sharding of the arrays of attention along the axes of a mesh.

Devices that share a sequence form a ring. A device keeps its queries; keys travel
around the ring together with their sums. Where later queries see more keys than earlier
ones (a causal mask), a device has two chunks of the sequence: of 2 n chunks, device i
has chunks i and 2 n - 1 - i, so that all have the same work.

Source: Liu et al. 2023 (ring attention), https://arxiv.org/abs/2310.01889; the order of
the chunks: Brandon et al. 2023, section 3, https://arxiv.org/abs/2311.09431.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import masks
from mha_haiku.core.attention.inputs import Inputs, Nonfinite, Weighting
from mha_haiku.core.masks import relative

Spec = jax.sharding.PartitionSpec
AnySpec = Any  # a `Spec`, in the place of an array in a pytree
AXIS = "sequence"  # of the ring
AXES = ("data", "heads", AXIS)
# From (query chunk, key chunk), their arrays, and the sums so far (per query, per key,
# per device), to the new sums.
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


class Ring(NamedTuple):
    """The devices along the axis `AXIS`; methods are called inside `shard_map`."""

    size: int  # n, the number of devices
    chunks: int  # C, the chunks of the sequence per device: 1 or 2

    @classmethod
    def of(cls, mask: masks.Mask, num_queries: int, num_keys: int, size: int) -> "Ring":
        """Makes a ring of `size` devices, with evenly balanced work if possible."""
        can_halve = not (num_queries % (2 * size) or num_keys % (2 * size))
        return cls(size, 2 if size > 1 and can_halve and _is_lopsided(mask) else 1)

    def to_chunks(self, tree: Any, axis: int) -> Any:
        """Splits the device's part of the sequence into chunks `[C, ...]`."""

        def split(x: Array) -> Array:
            if self.chunks == 1:
                return x[None]
            even, odd = jnp.split(x, 2, axis)
            even, odd = self._moved(even, 0), self._moved(odd, 1)
            is_even = self._is_even()
            low = jnp.where(is_even, even, odd)
            return jnp.stack([low, jnp.where(is_even, odd, even)])

        return jax.tree.map(split, tree)

    def from_chunks(self, tree: Any, axis: int) -> Any:
        """Joins chunks to the device's part of the sequence: undoes `to_chunks`."""

        def joined(chunks: Array) -> Array:
            if self.chunks == 1:
                return chunks[0]
            low, high = chunks
            is_even = self._is_even()
            even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
            even, odd = self._moved(even, 0, back=True), self._moved(odd, 1, back=True)
            return jnp.concatenate([even, odd], axis)

        return jax.tree.map(joined, tree)

    def around(
        self,
        meet: Meet,
        rows: Any,
        keys: Any,
        row_sums: Any,
        key_sums: Any,
        device_sums: Any,
    ) -> tuple[Any, Any, Any]:
        """Passes keys around the ring until every chunk of queries has met them all.

        `meet` adds the contribution of two chunks, and gets their numbers. Arrays and
        sums are `[C, ...]`; keys and their sums travel, and end where they began.
        """
        index = lax.axis_index(AXIS)
        query_chunks = self._chunks_of(index)

        def meet_all(step: int | Array, keys: Any, sums: tuple) -> tuple:
            key_chunks = self._chunks_of((index - step) % self.size)

            def meet_pair(pair: int | Array, sums: tuple) -> tuple:
                i, j = pair // self.chunks, pair % self.chunks
                row_sums, key_sums, device_sums = sums
                row, key, device_sums = meet(
                    (query_chunks[i], key_chunks[j]),
                    *_at((rows, i), (keys, j), (row_sums, i), (key_sums, j)),
                    device_sums,
                )
                return _put(row_sums, row, i), _put(key_sums, key, j), device_sums

            if self.chunks == 1:
                return meet_pair(0, sums)
            return lax.fori_loop(0, self.chunks**2, meet_pair, sums)

        def step(i: int | Array, carry: tuple) -> tuple:
            keys, sums = carry
            coming = self._passed_on(keys)  # sent first, to travel while these are used
            row_sums, key_sums, device_sums = meet_all(i, keys, sums)
            return coming, (row_sums, self._passed_on(key_sums), device_sums)

        sums = row_sums, key_sums, device_sums
        keys, sums = lax.fori_loop(0, self.size - 1, step, (keys, sums))
        row_sums, key_sums, device_sums = meet_all(self.size - 1, keys, sums)
        return row_sums, self._passed_on(key_sums), device_sums

    def _chunks_of(self, device: Array) -> Array:
        """Lists the chunks that a device has, `[C]`."""
        if self.chunks == 1:
            return jnp.stack([device])
        return jnp.stack([device, 2 * self.size - 1 - device])

    def _passed_on(self, tree: Any) -> Any:
        if self.size == 1:
            return tree
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, to_next), tree)

    def _moved(self, x: Array, half: int, back: bool = False) -> Array:
        # Half `half` of part i is chunk c = 2 i + half, which device min(c, 2 n - 1 -
        # c) works on. Each device has an even chunk and an odd one, so that the first
        # halves form a permutation, and so do the second halves.
        last = 2 * self.size - 1
        places = [(i, min(2 * i + half, last - 2 * i - half)) for i in range(self.size)]
        if back:
            places = [(there, here) for here, there in places]
        return lax.ppermute(x, AXIS, places)

    def _is_even(self):
        return lax.axis_index(AXIS) % 2 == 0


def _is_lopsided(mask: masks.Mask) -> bool:
    """Checks whether later queries see more keys, or fewer, than earlier ones."""
    parts = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, relative.Band))
    bands = [part for part in parts if isinstance(part, relative.Band)]
    return any((band.left is None) != (band.right is None) for band in bands)


def _at(*pairs: tuple[Any, int | Array]) -> list:
    return [
        jax.tree.map(lambda x, i=i: lax.dynamic_index_in_dim(x, i, 0, False), tree)
        for tree, i in pairs
    ]


def _put(tree: Any, new: Any, i: int | Array) -> Any:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), tree, new
    )
