"""What the rows of a map add up to, where devices share the map; see `row_sums`.

`B...` batch axes, T query positions, S key positions, C chunks on a device, H query
heads; P bins of queries and Q bins of keys in a pooled map. Any two chunks of queries
and keys add up by themselves, as the logsumexp of a row is known; sums of the rows
stay, those of the keys go round, those of cells are added over the devices in the end.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.attention import pooling, row_sums, sweep
from mha_haiku.attention.sharded import layout, ring, ring_attention

Array = jax.Array
Questions = dict[str, Array]  # fields of a `Question`
_LARGEST = ("largest", "at_offsets")  # of two parts the larger counts, not the sum


class _Rows(NamedTuple):
    """What stays: `[C, B..., t, H, K]`, `[C, B..., H, t]`, questions `[C, B..., t]`."""

    query: Array
    logsumexp: Array
    asked: Questions


class _Keys(NamedTuple):
    """What goes round: `[C, B..., s, G, K]`, and questions `[C, B..., s]`."""

    key: Array
    asked: Questions


def of_map(
    attention_map: Any,
    question: row_sums.Question,
    grid: pooling.Grid | None,
    sizes: sweep.Sizes,
) -> row_sums.MapSums:
    """Returns the sums of a map on a mesh; see `row_sums.of_map`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    mesh, batch_ndim = attention_map.mesh, len(batch_shape)
    size = mesh.shape[ring.AXIS]
    circle = ring.Ring.of(attention_map.mask, num_queries, num_keys, size)

    def local(found, question):
        rows, keys = _spread(found, question, circle)

        def meet(at, row, key, of_row, of_key, of_all):
            first = at[0] * row.query.shape[-3], at[1] * key.key.shape[-3]
            part = dataclasses.replace(
                found,
                query=row.query,
                key=key.key,
                logsumexp=row.logsumexp,
                mask=ring_attention.part_of_mask(
                    found.mask, first, key.key.shape[-3], num_keys
                ),
                bias=ring_attention.part_of_bias(found.bias, first, batch_ndim),
            )
            asked = question._replace(
                **row.asked, **key.asked, first_query=first[0], first_key=first[1]
            )
            sums = row_sums.of_map(part, asked, grid, sizes)
            cells = None if grid is None else of_all + sums.mass
            of_row = _added(of_row[0], sums.rows), sums.counts
            return of_row, of_key + sums.received, cells

        nothing = _nothing(rows, keys, question, grid)
        (of_rows, counts), received, cells = circle.around(meet, rows, keys, *nothing)
        of_rows = of_rows._replace(
            **{
                name: circle.home(x, -2 if name == "at_offsets" else -1)
                for name, x in of_rows._asdict().items()
                if x is not None
            }
        )
        cells = None if grid is None else lax.psum(cells, ring.AXIS)
        return row_sums.MapSums(
            of_rows, circle.home(counts, -1), circle.home(received, -1), cells
        )

    # What a map holds besides is not needed.
    shown = dataclasses.replace(attention_map, value=None, mesh=None)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_of_map(shown), _of_question(question, batch_ndim)),
        out_specs=_of_sums(question, grid, batch_ndim),
        check_vma=False,
    )(shown, question)


def _spread(found, question, circle) -> tuple[_Rows, _Keys]:
    asked = {
        name: circle.spread(x, -1)
        for name, x in question._asdict().items()
        if name in row_sums.PER_POSITION and x is not None
    }
    of_rows = {name: x for name, x in asked.items() if name in row_sums.PER_QUERY}
    of_keys = {name: x for name, x in asked.items() if name in row_sums.PER_KEY}
    rows = _Rows(
        circle.spread(found.query, -3), circle.spread(found.logsumexp, -1), of_rows
    )
    return rows, _Keys(circle.spread(found.key, -3), of_keys)


def _nothing(rows, keys, question, grid):
    """Returns sums of rows, whether they count, what keys receive, sums of cells."""
    shape, dtype = rows.logsumexp.shape, rows.logsumexp.dtype
    of_rows = row_sums.nothing(shape, question, dtype), jnp.zeros(shape, bool)
    received = jnp.zeros((*shape[:-1], keys.key.shape[-3]), dtype)
    if grid is None:
        return of_rows, received, None
    cells = (*shape[1:-1], grid.rows.count, grid.columns.count)
    return of_rows, received, jnp.zeros(cells, dtype)


def _added(first, second) -> row_sums.RowSums:
    both = jax.tree.map(jnp.add, first, second)
    larger = {
        name: jnp.maximum(getattr(first, name), getattr(second, name))
        for name in _LARGEST
    }
    return both._replace(**larger)


def _of_map(shown):
    """Returns how the arrays of a map are shared."""
    *batch_shape, num_heads, _, _ = shown.shape
    own = layout.rows(len(batch_shape))
    heads = tuple(batch_shape), num_heads
    return dataclasses.replace(
        shown,
        query=own,
        key=own,
        logsumexp=layout.logsumexp(len(batch_shape)),
        mask=layout.of_mask(shown.mask, *heads),
        bias=layout.aligned(shown.bias, *heads),
        score=layout.aligned(shown.score, *heads),
    )


def _of_question(question, batch_ndim) -> row_sums.Question:
    at_positions, everywhere = layout.positions(batch_ndim), layout.Spec()
    fields = question._asdict()
    of_fields = {
        name: at_positions if name in row_sums.PER_POSITION else everywhere
        for name in fields
    }
    missing = {name: None for name, x in fields.items() if x is None}
    return row_sums.Question(**of_fields | missing)


def _of_sums(question, grid, batch_ndim) -> row_sums.MapSums:
    at_rows = layout.logsumexp(batch_ndim)
    rows = row_sums.nothing((), question, jnp.float32)
    rows = jax.tree.map(lambda _: at_rows, rows)
    rows = rows._replace(at_offsets=layout.Spec(*at_rows, None))
    cells = None if grid is None else layout.Spec(*at_rows[:-1])
    return row_sums.MapSums(rows, at_rows, at_rows, cells)
