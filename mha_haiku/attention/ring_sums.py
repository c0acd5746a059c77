"""What the rows of a map add up to, where devices share the map; see `row_sums`.

Any two chunks of queries and keys add up by themselves, as the logsumexp of a row is
known; sums of the rows stay, those of the keys go round, those of cells are added over
the devices in the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mha_haiku.attention import layout, pooling, ring, ring_attention, row_sums, sweep

Array = jax.Array
_LARGEST = ("largest", "at_offsets")  # of parts the largest counts, of others the sum


def of_map(
    attention_map: Any,
    question: row_sums.Question,
    grid: pooling.Grid | None,
    sizes: sweep.Sizes,
) -> row_sums.MapSums:
    """Returns the sums of a map on its mesh; see `row_sums.of_map`."""
    *batch_shape, num_heads, num_queries, num_keys = attention_map.shape
    mesh, batch_ndim = attention_map.mesh, len(batch_shape)
    circle = ring.Ring.of(
        attention_map.mask, num_queries, num_keys, mesh.shape[ring.AXIS]
    )

    def local(found, question):
        rows = _spread(circle, question, row_sums.PER_QUERY)
        keys = _spread(circle, question, row_sums.PER_KEY)
        rows |= {
            "query": circle.spread(found.query, -3),
            "logsumexp": circle.spread(found.logsumexp, -1),
        }
        keys["key"] = circle.spread(found.key, -3)
        dtype = found.logsumexp.dtype
        heads = rows["logsumexp"].shape[1:-1]
        size = keys["key"].shape[-3]
        cells = None
        if grid is not None:
            cells = jnp.zeros((*heads, grid.rows.count, grid.columns.count), dtype)
        nothing = (
            (
                row_sums.nothing(rows["logsumexp"].shape, question, dtype),
                jnp.zeros(rows["logsumexp"].shape, bool),
            ),
            jnp.zeros((circle.chunks, *heads, size), dtype),
            cells,
        )

        def meet(at, row, key, of_row, of_key, of_all):
            asked = {name: row.pop(name) for name in row_sums.PER_QUERY if name in row}
            asked |= {name: key.pop(name) for name in row_sums.PER_KEY if name in key}
            first = at[0] * row["query"].shape[-3], at[1] * size
            part = type(found)(
                row["query"],
                key["key"],
                row["logsumexp"],
                ring_attention.part_of_mask(found.mask, first, size, num_keys),
                ring_attention.part_of_bias(found.bias, first, batch_ndim),
                found.score,
            )
            asked = question._replace(**asked, first_query=first[0], first_key=first[1])
            sums = row_sums.of_map(part, asked, grid, sizes)
            added = jax.tree.map(jnp.add, of_row[0], sums.rows)
            largest = {
                name: jnp.maximum(*(getattr(x, name) for x in (of_row[0], sums.rows)))
                for name in _LARGEST
            }
            cells = None if grid is None else of_all + sums.mass
            of_row = added._replace(**largest), sums.counts
            return of_row, of_key + sums.received, cells

        (of_rows, counts), received, cells = circle.around(meet, rows, keys, *nothing)
        of_rows = row_sums.RowSums(
            **{
                name: None
                if x is None
                else circle.home(x, -2 if name == "at_offsets" else -1)
                for name, x in of_rows._asdict().items()
            }
        )
        cells = None if grid is None else lax.psum(cells, ring.AXIS)
        return row_sums.MapSums(
            of_rows, circle.home(counts, -1), circle.home(received, -1), cells
        )

    at_rows, of_heads = layout.logsumexp(batch_ndim), layout.logsumexp(batch_ndim)[:-1]
    own, at_positions = layout.rows(batch_ndim), layout.positions(batch_ndim)
    none = layout.Spec()
    of_sums = row_sums.nothing((), question, jnp.float32)
    of_sums = jax.tree.map(lambda _: at_rows, of_sums)._replace(
        at_offsets=layout.Spec(*at_rows, None)
    )
    specs = type(attention_map)(
        own,
        own,
        at_rows,
        layout.of_mask(attention_map.mask, tuple(batch_shape), num_heads),
        layout.aligned(attention_map.bias, tuple(batch_shape), num_heads),
        layout.aligned(attention_map.score, tuple(batch_shape), num_heads),
    )
    of_question = row_sums.Question(
        **{
            name: None
            if x is None
            else at_positions
            if name in row_sums.PER_POSITION
            else none
            for name, x in question._asdict().items()
        }
    )
    shown = type(attention_map)(
        attention_map.query,
        attention_map.key,
        attention_map.logsumexp,
        attention_map.mask,
        attention_map.bias,
        attention_map.score,
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, of_question),
        out_specs=row_sums.MapSums(
            of_sums, at_rows, at_rows, None if grid is None else layout.Spec(*of_heads)
        ),
        check_vma=False,
    )(shown, question)


def _spread(circle, question, names) -> dict[str, Array]:
    return {
        name: circle.spread(getattr(question, name), -1)
        for name in names
        if getattr(question, name) is not None
    }
