"""The fold over the tiles of a map that devices share; see `fold` and `ring`.

C chunks on a device. Any two chunks of queries and keys are a part of the map, as the
logsumexp of a row is known; sums of queries stay, sums of keys go round with the keys,
and sums of heads are added over the devices in the end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.observation import Given, Observation, Sums
from mha_haiku.core.attention.sharded import layout, ring
from mha_haiku.core.attention.tiled import fold, sweep, views

Array = jax.Array


def forward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    mesh: jax.sharding.Mesh,
) -> Sums:
    """Folds a map on its mesh; see `fold_gradient.fold`."""
    sizes_of_map = maps[0].query.shape[-3], maps[0].key.shape[-3]
    mask, num_devices = maps[0].weighting.mask, mesh.shape[ring.AXIS]
    device_ring = ring.Ring.of(mask, *sizes_of_map, num_devices)
    at_heads = maps[0].query.ndim - 3 + (not observation.side_by_side)

    def local(maps, given):
        stay, go_round = _spread(maps, given, device_ring)

        def meet(at, row, key, row_sums, key_sums, head_sums):
            parts, own, first = _part(maps, at, row, key)
            sums = fold.forward(observation, parts, own, sizes, first)
            return (
                observation.merge(row_sums, sums.queries),
                jax.tree.map(jnp.add, key_sums, sums.keys),
                jax.tree.map(jnp.add, head_sums, sums.head),
            )

        nothing = _nothing(observation, stay, go_round)
        row_sums, key_sums, head_sums = device_ring.around(
            meet, stay, go_round, *nothing
        )
        # The axis of positions stands behind chunks, B... and H.
        row_sums, key_sums = jax.tree.map(
            lambda x: device_ring.from_chunks(x, at_heads + 1 - x.ndim),
            (row_sums, key_sums),
        )
        head_sums = jax.tree.map(lambda x: lax.psum(x, ring.AXIS), head_sums)
        return Sums(row_sums, key_sums, head_sums)

    whole = jax.eval_shape(lambda *x: fold.forward(observation, *x, sizes), maps, given)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=_specs(observation, maps, given),
        out_specs=_specs_of_sums(observation, whole, maps),
        check_vma=False,
    )(maps, given)


def _spread(maps, given, device_ring) -> tuple[tuple, tuple]:
    """Returns what stays on its device, and what goes round, in chunks `[C, ...]`."""
    at_positions = maps[0].query.ndim - 3

    def chunks(tree):
        return jax.tree.map(
            lambda x: device_ring.to_chunks(x, at_positions - x.ndim), tree
        )

    return (
        (
            chunks(tuple(each.query for each in maps)),
            tuple(device_ring.to_chunks(each.logsumexp, -1) for each in maps),
            chunks(given.queries),
        ),
        (chunks(tuple(each.key for each in maps)), chunks(given.keys)),
    )


def _part(maps, at, row, key):
    """Collects the inputs for a look at two chunks of the given numbers."""
    queries, logsumexps, of_queries = row
    keys, of_keys = key
    first = tiles.Origin(at[0] * queries[0].shape[-3], at[1] * keys[0].shape[-3])
    parts = tuple(
        views.Factors(query, own_key, each.weighting.moved(first), logsumexp)
        for each, query, own_key, logsumexp in zip(
            maps, queries, keys, logsumexps, strict=True
        )
    )
    return parts, Given(of_queries, of_keys), first


def _nothing(observation, stay, go_round) -> Sums:
    """Makes the sums `[C, B..., H, t, ...]` of chunks that met no other yet."""
    _, (logsumexp, *_), of_queries = stay
    (key, *_), of_keys = go_round
    *shape, num_heads, num_queries = logsumexp.shape
    batch_ndim = len(shape) - 1
    given = jax.tree.map(
        lambda x: x[(0,) * (batch_ndim + 1)][:, 0],
        Given(of_queries, of_keys),
    )
    nothing = observation.nothing(num_queries, key.shape[-3], given, logsumexp.dtype)
    heads = () if observation.side_by_side else (num_heads,)

    def all_of(tree, chunks):
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (*chunks, *heads, *x.shape)), tree
        )

    return Sums(
        all_of(nothing.queries, shape),
        all_of(nothing.keys, shape),
        all_of(nothing.head, shape[1:]),
    )


def _specs(observation, maps, given):
    """Builds the sharding of maps and given arrays; heads side by side stay whole."""
    batch_ndim = maps[0].query.ndim - 3
    heads = None if observation.side_by_side else "heads"
    batch = layout.rows(batch_ndim)[:batch_ndim]
    rows = layout.Spec(*batch, "sequence", heads)

    def spec(x):
        axes = (
            name if size > 1 else None
            for name, size in zip(rows[: batch_ndim + 2], x.shape, strict=False)
        )
        return layout.Spec(*axes)

    map_specs = tuple(
        views.Factors(
            rows,
            rows,
            layout.weighting_specs(each.weighting, share_heads=heads is not None),
            layout.Spec(*batch, heads, "sequence"),
        )
        for each in maps
    )
    return map_specs, jax.tree.map(spec, given)


def _specs_of_sums(observation, sums, maps) -> Sums:
    batch_ndim = maps[0].query.ndim - 3
    axes = layout.rows(batch_ndim)[:batch_ndim]
    axes += () if observation.side_by_side else ("heads",)
    with_positions, without = layout.Spec(*axes, "sequence"), layout.Spec(*axes)
    return Sums(
        jax.tree.map(lambda _: with_positions, sums.queries),
        jax.tree.map(lambda _: with_positions, sums.keys),
        jax.tree.map(lambda _: without, sums.head),
    )
