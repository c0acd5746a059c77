"""The fold over the tiles of a sharded map; see `fold` and `ring`.

C chunks on a device. Any two chunks of queries and keys are a part of the map, as the
logsumexp of a row is known; sums of queries stay, sums of keys travel with the keys,
and sums of heads are added over the devices at the end.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.log_sum import LogSum
from mha_haiku.core.attention.observation import Given, Observation, Sums
from mha_haiku.core.attention.sharded import layout, ring
from mha_haiku.core.attention.tiled import fold, sweep

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RingFold:
    """Folds maps on a mesh; see `fold.forward`."""

    mesh: jax.sharding.Mesh

    def __repr__(self) -> str:
        return f"on {self.mesh.size} devices"

    def __call__(
        self,
        observation: Observation,
        factors: sweep.Factors,
        given: Given,
        sizes: sweep.Sizes,
    ) -> Sums:
        """Folds an observation over the tiles of a map."""
        return _folded(self.mesh, observation, factors, given, sizes)


def _folded(mesh, observation, factors, given, sizes) -> Sums:
    *batch_shape, num_queries, _, _ = factors.query.shape
    batch_ndim, num_keys = len(batch_shape), factors.key.shape[-3]
    mask, num_devices = factors.weighting.mask, mesh.shape[ring.AXIS]
    device_ring = ring.Ring.of(mask, num_queries, num_keys, num_devices)

    def local(factors, given):
        stay, go_round = device_ring.to_chunks(
            ((factors.query, given.queries), (factors.key, given.keys)), batch_ndim
        )
        log_sums = device_ring.to_chunks(factors.log_sum, batch_ndim + 1)

        def meet(at, row, key, row_sums, key_sums, head_sums):
            (query, of_queries), log_sum = row
            key, of_keys = key
            first = tiles.Origin(at[0] * query.shape[-3], at[1] * key.shape[-3])
            weighting = factors.weighting.moved(first)
            part = sweep.Factors(query, key, weighting, log_sum)
            of_chunks = Given(of_queries, of_keys)
            sums = fold.forward(observation, part, of_chunks, sizes, first)
            return (
                observation.merge(row_sums, sums.queries),
                jax.tree.map(jnp.add, key_sums, sums.keys),
                jax.tree.map(jnp.add, head_sums, sums.head),
            )

        nothing = _nothing(observation, log_sums.logsumexp, stay, go_round)
        row_sums, key_sums, head_sums = device_ring.around(
            meet, (stay, log_sums), go_round, *nothing
        )
        # The axis of positions follows B... and H.
        row_sums, key_sums = device_ring.from_chunks(
            (row_sums, key_sums), batch_ndim + 1
        )
        head_sums = jax.tree.map(lambda x: lax.psum(x, ring.AXIS), head_sums)
        return Sums(row_sums, key_sums, head_sums)

    rows, rows_of_heads = layout.rows(batch_ndim), layout.logsumexp(batch_ndim)
    weighting = layout.weighting_specs(factors.weighting)

    def spec(x):
        axes = zip(rows, x.shape, strict=False)
        return layout.Spec(*(name if size > 1 else None for name, size in axes))

    whole = jax.eval_shape(
        lambda *x: fold.forward(observation, *x, sizes), factors, given
    )
    specs_of_sums = Sums(
        *(jax.tree.map(lambda _: rows_of_heads, sums) for sums in whole[:2]),
        head=jax.tree.map(lambda _: layout.Spec(*rows_of_heads[:-1]), whole.head),
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            sweep.Factors(rows, rows, weighting, LogSum(rows_of_heads, rows_of_heads)),
            jax.tree.map(spec, given),
        ),
        out_specs=specs_of_sums,
        check_vma=False,
    )(factors, given)


def _nothing(observation, logsumexp, stay, go_round) -> Sums:
    """Makes the initial sums `[C, B..., H, t, ...]` of chunks."""
    (_, of_queries), (key, of_keys) = stay, go_round
    *shape, num_queries = logsumexp.shape
    given = jax.tree.map(
        lambda x: x[(0,) * (len(shape) - 1)][:, 0], Given(of_queries, of_keys)
    )
    nothing = observation.nothing(num_queries, key.shape[-3], given, logsumexp.dtype)

    def all_of(tree, shape):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), tree)

    return Sums(
        all_of(nothing.queries, shape),
        all_of(nothing.keys, shape),
        all_of(nothing.head, shape[1:]),
    )
