"""The fold over the tiles of a map that devices share; see `fold` and `ring`.

`B...` batch axes, T query positions, S key positions, C chunks on a device, H heads.
Any two chunks of queries and keys are a part of the map, as the logsumexp of a row is
known; sums of queries stay, sums of keys go round with the keys, and sums of heads
are added over the devices in the end.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.core import tiles
from mha_haiku.core.attention.observation import Given, Observation, Sums
from mha_haiku.core.attention.sharded import layout, ring
from mha_haiku.core.attention.tiled import fold, sweep, views

Array = jax.Array


class _Stay(NamedTuple):
    """What stays: per map `[C, B..., t, H, K]` and `[C, B..., H, t]`; what is given."""

    query: tuple[Array, ...]
    logsumexp: tuple[Array, ...]
    given: Any


class _GoRound(NamedTuple):
    """What goes round: per map `[C, B..., s, G, K]`, and what is given of keys."""

    key: tuple[Array, ...]
    given: Any


def forward(
    observation: Observation,
    maps: tuple[views.Factors, ...],
    given: Given,
    sizes: sweep.Sizes,
    mesh: jax.sharding.Mesh,
) -> Sums:
    """Folds a map on its mesh; see `fold_gradient.fold`."""
    device_ring = _ring_of(maps, mesh)
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


def _ring_of(maps, mesh) -> ring.Ring:
    num_queries, num_keys = maps[0].query.shape[-3], maps[0].key.shape[-3]
    size = mesh.shape[ring.AXIS]
    return ring.Ring.of(maps[0].weighting.mask, num_queries, num_keys, size)


def _spread(maps, given, device_ring) -> tuple[_Stay, _GoRound]:
    at_positions = maps[0].query.ndim - 3

    def chunks(tree):
        return jax.tree.map(
            lambda x: device_ring.to_chunks(x, at_positions - x.ndim), tree
        )

    return (
        _Stay(
            chunks(tuple(each.query for each in maps)),
            tuple(device_ring.to_chunks(each.logsumexp, -1) for each in maps),
            chunks(given.queries),
        ),
        _GoRound(chunks(tuple(each.key for each in maps)), chunks(given.keys)),
    )


def _part(maps, at, row, key):
    """Returns what two chunks, of the given numbers, need to be looked at."""
    first = tiles.Origin(at[0] * row.query[0].shape[-3], at[1] * key.key[0].shape[-3])
    parts = tuple(
        views.Factors(query, own_key, each.weighting.moved(first), logsumexp)
        for each, query, own_key, logsumexp in zip(
            maps, row.query, key.key, row.logsumexp, strict=True
        )
    )
    return parts, Given(row.given, key.given), first


def _nothing(observation, stay, go_round) -> Sums:
    """Returns the sums `[C, B..., H, t, ...]` of chunks that met no other yet."""
    logsumexp, key = stay.logsumexp[0], go_round.key[0]
    *shape, num_heads, num_queries = logsumexp.shape
    batch_ndim = len(shape) - 1
    given = jax.tree.map(
        lambda x: x[(0,) * (batch_ndim + 1)][:, 0],
        Given(stay.given, go_round.given),
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
    """Returns how maps and what is given are shared; heads side by side are not."""
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
