"""Exact attention tile by tile, in O(T + S) memory, forward and backward.

The softmax of a row is built up over tiles of keys; its gradient computes the tiles
again from the logsumexp. Tiles that the mask rules out for all of their queries are
skipped.

Source: Rabe and Staats 2021, https://arxiv.org/abs/2112.05682; Dao et al. 2022
(FlashAttention), algorithms 1 and 4, https://arxiv.org/abs/2205.14135.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mha_haiku.core import checks, masks, tiles
from mha_haiku.core.attention import dense, gradients, products, scores
from mha_haiku.core.attention.factors import Factors, Start, key_head
from mha_haiku.core.attention.inputs import Inputs, Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.tiled import sweep

# The sizes of tiles, which may be larger than the map, and the rate of dropout.
Options = tuple[sweep.Sizes, float]


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """Attention with tiles of chosen sizes; None stands for what suits the platform."""

    rows: int | None = None  # queries in a tile
    columns: int | None = None  # keys in a tile
    heads: int | None = None  # heads, of any examples, computed together

    def __post_init__(self):
        for field, size in dataclasses.asdict(self).items():
            if size is not None:
                checks.positive_integer(field, size)

    def __call__(self, inputs: Inputs, dropout_rate: float) -> tuple[Array, LogSum]:
        """Computes values `[B..., T, H, V]` and logsumexp `[B..., H, T]`."""
        if not math.prod(inputs.map_shape) * inputs.value.shape[-1]:
            return dense.attend(inputs, dropout_rate)
        return attend(inputs, self.options(inputs, dropout_rate))

    def options(self, inputs: Inputs, dropout_rate: float) -> Options:
        """Returns what `forward` and `backward` are compiled for."""
        best = sweep.default_sizes(
            inputs.map_shape, inputs.weighting, jax.default_backend()
        )
        own_sizes = dataclasses.astuple(self)
        sizes = (own or other for own, other in zip(own_sizes, best, strict=True))
        return sweep.Sizes(*sizes), dropout_rate


def forward(inputs: Inputs, options: Options) -> tuple[Array, LogSum, tuple]:
    """Computes values and logsumexp, and saves nothing else."""
    *batch_shape, num_heads, num_queries, num_keys = inputs.map_shape
    largest_sizes, dropout_rate = options
    sizes = largest_sizes.fitted(num_queries, num_keys)
    dtype = products.accumulation_dtype(inputs.query.dtype)
    value_size = inputs.value.shape[-1]
    # Where sizes and dtypes agree, the values of a head are written over its queries,
    # which are read by then: the loop over heads has one array and not two.
    room = inputs.query
    over_queries = (value_size, inputs.value.dtype) == (room.shape[-1], room.dtype)
    if not over_queries:
        room = jnp.zeros((*room.shape[:-1], value_size), inputs.value.dtype)

    mask, bias, score = inputs.weighting[:3]
    # Without it the CPU compiler makes one loop of all that a small tile needs.
    can_hide = not (
        isinstance(mask, masks.Full)
        and bias is None
        and isinstance(score, scores.DotProduct)
    )

    def attend_head(example: tuple, head: Array, totals: tuple):
        unread = inputs._replace(query=totals[0]) if over_queries else inputs
        view, value = _view(unread, example, head, nonfinite=jnp.nan)
        dropout = _dropout(inputs, dropout_rate, example, head)

        def add_tile(
            rows: tiles.Span, columns: tiles.Span, seen_from: Start, sums: tuple
        ):
            mixed, total, largest = sums
            tile = view.scores(rows, columns, seen_from)
            new = jnp.maximum(largest, tile.max(-1))
            weights, shrunk = jnp.exp(tile - new[:, None]), jnp.exp(largest - new)
            total = total * shrunk + weights.sum(-1)
            weights = weights if dropout is None else weights * dropout(rows, columns)
            part = products.mix(weights[None], tiles.take(value, columns, 0)[:, None])
            return mixed * shrunk[:, None] + part[:, 0], total, new

        def attend_rows(rows: tiles.Span, fresh_from: int | Array, outputs: tuple):
            del fresh_from  # rows that a block before had come out the same again
            sums = (
                jnp.zeros((rows.size, value_size), dtype),
                jnp.zeros(rows.size, dtype),
                jnp.full(rows.size, jnp.finfo(dtype).min, dtype),
            )
            mixed, total, largest = sweep.over_keys(
                functools.partial(add_tile, rows),
                sums,
                view.weighting,
                rows,
                num_keys,
                sizes.columns,
            )
            shares = jnp.where(total == 0, 1, total) if can_hide else total
            new = mixed / shares[:, None], *LogSum.of(largest, total)
            return tuple(
                lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), rows.start, 0)
                for x, part in zip(outputs, new, strict=True)
            )

        outputs = (
            jnp.zeros((num_queries, value_size), inputs.value.dtype),
            jnp.zeros(num_queries, dtype),
            jnp.zeros(num_queries, dtype),
        )
        return sweep.over_rows(attend_rows, outputs, num_queries, sizes.rows)

    rows = jnp.zeros(inputs.map_shape[:-1], dtype)
    values, *log_sum = sweep.summed_over_heads(
        attend_head, (room, rows, rows), (1, 0, 0), batch_shape, num_heads, sizes.heads
    )
    return values, LogSum(*log_sum), ()


def backward(
    inputs: Inputs,
    saved: tuple,
    rows_grad: gradients.RowGradients,
    wants_bias: bool,
    options: Options,
) -> gradients.Gradients:
    """Computes the gradients, tile by tile."""
    del saved
    *batch_shape, num_heads, num_queries, num_keys = inputs.map_shape
    largest_sizes, dropout_rate = options
    sizes = largest_sizes.fitted(num_queries, num_keys)
    dtype = products.accumulation_dtype(inputs.query.dtype)

    def head_gradients(
        example: tuple, head: Array, totals: tuple
    ) -> gradients.Gradients:
        del totals
        view, value = _view(inputs, example, head, nonfinite=0)
        dropout = _dropout(inputs, dropout_rate, example, head)
        values_grad = tiles.at_batch(rows_grad.values, example)[:, head]
        shift, logsumexp = (tiles.at_batch(x, example)[head] for x in rows_grad[1:])

        def add_tile(
            rows: tiles.Span,
            row_gradients: gradients.RowGradients,
            columns: tiles.Span,
            seen_from: Start,
            sums: gradients.Gradients,  # of a block of queries, and of all keys
        ) -> gradients.Gradients:
            tile = gradients.tile_gradients(
                tiles.take(view.query, rows, 0)[:, None],
                tiles.take(view.key, columns, 0)[:, None],
                tiles.take(value, columns, 0)[:, None],
                view.weighting.score,
                view.scores(rows, columns, seen_from)[None],
                None if dropout is None else dropout(rows, columns)[None],
                row_gradients,
            )
            bias, bias_grad = view.weighting.bias, sums.bias
            if bias is not None and bias_grad is not None:
                at = view.weighting.origin.at(rows, columns)
                bias_grad = bias.add_gradient(bias_grad, tile.scores, *at)
            return gradients.Gradients(
                sums.query + tile.query[:, 0],
                tiles.add(sums.key, tile.key[:, 0].T, columns.start, 1),
                tiles.add(sums.value, tile.value[:, 0].T, columns.start, 1),
                bias_grad,
                jax.tree.map(jnp.add, sums.score, tile.score),
            )

        def add_block(
            rows: tiles.Span, fresh_from: int | Array, sums: gradients.Gradients
        ) -> gradients.Gradients:
            row_gradients = gradients.RowGradients(
                tiles.take(values_grad, rows, 0)[:, None],
                tiles.take(shift, rows, 0)[None],
                tiles.take(logsumexp, rows, 0)[None],
            )
            if num_queries % sizes.rows:
                fresh = rows.array() >= fresh_from
                row_gradients = row_gradients._replace(
                    logsumexp=jnp.where(fresh, row_gradients.logsumexp, jnp.inf)
                )
            block_query = jnp.zeros((rows.size, view.query.shape[-1]), dtype)
            new = sweep.over_keys(
                functools.partial(add_tile, rows, row_gradients),
                sums._replace(query=block_query),
                view.weighting,
                rows,
                num_keys,
                sizes.columns,
                is_split=False,
            )
            query_grad = tiles.add(sums.query, new.query, rows.start, 0)
            return new._replace(query=query_grad)

        # Sums of keys as [K, S] and [V, S]: a tile's columns are then contiguous, and
        # sums over queries are made fastest.
        sums = gradients.Gradients(
            jnp.zeros(view.query.shape, dtype),
            jnp.zeros(view.key.shape[::-1], dtype),
            jnp.zeros(value.shape[::-1], dtype),
            *zeros(view.weighting, wants_bias),
        )
        sums = sweep.over_rows(add_block, sums, num_queries, sizes.rows)
        bias, score = jax.tree.map(lambda x: x.squeeze(0), (sums.bias, sums.score))
        return gradients.Gradients(sums.query, sums.key.T, sums.value.T, bias, score)

    totals = (
        *(jnp.zeros(x.shape, dtype) for x in inputs[:3]),
        *zeros(inputs.weighting, wants_bias),
    )
    axes = (1, 1, 1, 0, 0)  # of heads, after B..., in the arrays of `Gradients`
    # A tile has twice as many arrays here, so that half as many heads fit a cache.
    together = max(sizes.heads // 2, 1)
    sums = sweep.summed_over_heads(
        head_gradients, totals, axes, batch_shape, num_heads, together
    )
    return gradients.Gradients(*sums)


attend = gradients.differentiable(forward, backward)


def zeros(weighting: Weighting, wants_bias: bool) -> tuple:
    """Makes the zeros with which gradients of bias, if wanted, and score begin."""
    bias = weighting.bias if wants_bias else None
    return jax.tree.map(jnp.zeros_like, (bias, weighting.score))


def _view(inputs: Inputs, example: tuple, head: Array, *, nonfinite: float):
    # Nonfinite queries and keys become `nonfinite`: NaN, which reaches their own scores
    # alone, or 0. Values become 0, as the sums over keys would spread NaN to rows it is
    # masked for.
    whole = Factors(inputs.query, inputs.key, inputs.weighting)
    view, num_heads = whole.head(example, head), inputs.query.shape[-2]
    value = key_head(inputs.value, example, head, num_heads)
    if inputs.nonfinite is None:
        return view, value
    queries = tiles.at_batch(inputs.nonfinite.queries, example)[:, head, None]
    keys = inputs.nonfinite.keys[..., None]
    keys = key_head(keys, example, head, num_heads)
    query, key = (
        jnp.where(is_nonfinite, nonfinite, x)
        for is_nonfinite, x in ((queries, view.query), (keys, view.key))
    )
    return dataclasses.replace(view, query=query, key=key), jnp.where(keys, 0, value)


def _dropout(inputs: Any, rate: float, example: tuple, head: Array) -> Callable | None:
    """Makes a function from rows and columns to their dropout factors, or None."""
    if not rate:
        return None
    n = 0  # of the head, counted over all examples
    for i, size in zip((*example, head), inputs.map_shape[:-2], strict=True):
        n = n * size + i
    return functools.partial(dense.dropout_factors, inputs.rng, rate, n)
