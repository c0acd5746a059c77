"""Numbers that tell what a head does, from one pass over the tiles of its map.

`B...` batch axes, H heads, T query positions, S key positions; P bins of queries and Q
bins of keys in a pooled map. Nothing of size T x S is held.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku.attention import pooling, row_sums, sweep

Array = jax.Array


class Statistics(NamedTuple):
    """What a head does, averaged over the queries that see anything.

    Each is `[B..., H]`, or `[B..., H, T]` per query on request (0 where a query sees
    nothing), unless its shape is given. Positions, distances and tokens are those of
    the inputs; queries stand at t + `query_offset`.

    Attributes:
      entropy: Of a row, in nats; 0 to log S (Clark et al. 2019, section 3.2,
        https://arxiv.org/abs/1906.04341).
      perplexity: exp(entropy) of a row: how many keys it attends to, 1 to S.
      squared_weights: The sum of a row's squared weights, 1 / S to 1.
      largest_weight: Of a row; its mean is the head's confidence (Voita et al. 2019,
        section 4, https://arxiv.org/abs/1905.09418).
      distance: The expected |t - s|, in positions.
      rms_distance: The root of the expected (t - s)^2, in positions.
      previous_position: Mass on s = t - 1.
      same_position: Mass on s = t.
      next_position: Mass on s = t + 1.
      first_position: Mass on s = 0.
      largest_at_previous: Share of rows whose largest weight is at s = t - 1. A head
        for which one of these three is 0.9 or more is positional (Voita et al. 2019,
        section 5.1).
      largest_at_same: The same of s = t.
      largest_at_next: The same of s = t + 1.
      chosen_positions: Mass on the positions that were asked about, or None.
      same_token: Mass on keys of the query's own token; None without tokens.
      induction: Mass on keys that followed earlier occurrences of the query's token
        (Olsson et al. 2022, https://arxiv.org/abs/2209.11895); None without tokens.
      received: `[B..., H, S]`, the mass that each key receives from all queries.
      received_gini: `[B..., H]`, how unequal that is among the keys that any query may
        see, by their Gini coefficient: 0 if all receive the same, towards 1 if one
        receives all.
      num_queries: `[B..., H]`, how many queries count.
      pooled: `[B..., H, P, Q]`, the map at a coarse grain; None unless asked for.
    """

    entropy: Array
    perplexity: Array
    squared_weights: Array
    largest_weight: Array
    distance: Array
    rms_distance: Array
    previous_position: Array
    same_position: Array
    next_position: Array
    first_position: Array
    largest_at_previous: Array
    largest_at_same: Array
    largest_at_next: Array
    chosen_positions: Array | None
    same_token: Array | None
    induction: Array | None
    received: Array
    received_gini: Array
    num_queries: Array
    pooled: Array | None


def question_of(
    map_shape: tuple[int, ...],
    *,
    query_offset: int,
    counted: Array | None,
    positions: Array | None,
    tokens: Array | None,
    key_tokens: Array | None,
) -> row_sums.Question:
    """Returns what is asked of a map (B..., H, T, S); see `AttentionMap.statistics`.

    Raises:
      ValueError: If an array does not fit the map.
    """
    *batch_shape, _, num_queries, num_keys = map_shape
    if key_tokens is not None and tokens is None:
        raise ValueError("key_tokens needs tokens, those of the queries.")
    key_tokens = tokens if key_tokens is None else key_tokens
    of_queries, of_keys = (*batch_shape, num_queries), (*batch_shape, num_keys)
    _check_fits("counted", counted, of_queries, bool)
    _check_fits("positions", positions, of_keys, bool)
    _check_fits("tokens", tokens, of_queries, jnp.integer)
    _check_fits("key_tokens", key_tokens, of_keys, jnp.integer)
    preceding = None if key_tokens is None else jnp.roll(key_tokens, 1, -1)
    zero = jnp.zeros((), jnp.int32)
    return row_sums.Question(
        jnp.asarray(query_offset),
        counted,
        positions,
        tokens,
        key_tokens,
        preceding,
        zero,
        zero,
    )


@functools.partial(jax.jit, static_argnames=("grid", "per_query", "sizes"))
def statistics(
    attention_map: Any,
    question: row_sums.Question,
    *,
    grid: pooling.Grid | None,
    per_query: bool,
    sizes: sweep.Sizes,
) -> Statistics:
    """Returns the statistics of a map.

    Args:
      attention_map: The `AttentionMap`.
      question: What is asked.
      grid: The cells of the pooled map; None: no pooled map.
      per_query: Whether rows are kept apart.
      sizes: Of the tiles.
    """
    *batch_shape, _, num_queries, num_keys = attention_map.shape
    if attention_map.mesh is None:
        sums = row_sums.of_map(attention_map, question, grid, sizes)
    else:
        sums = row_sums.SHARED["sums"](attention_map, question, grid, sizes)
    unseen = attention_map.mask.aligned_unseen_keys(
        num_queries, num_keys, len(batch_shape)
    )
    pooled = None if grid is None else grid.rows.mean(sums.mass, sums.counts)
    return _summary(sums.rows, sums.counts, sums.received, unseen, pooled, per_query)


def _summary(sums, counts, received, unseen, pooled, per_query) -> Statistics:
    """Returns the statistics from sums over the keys of each row, `[B..., H, T]`."""
    dtype = sums.entropy.dtype
    count = counts.sum(-1)

    def mean(of_rows):
        of_rows = jnp.where(counts, of_rows, 0).astype(dtype)
        return of_rows if per_query else of_rows.sum(-1) / jnp.maximum(count, 1)

    def mean_or_none(of_rows):
        return None if of_rows is None else mean(of_rows)

    entropy = jnp.maximum(sums.entropy, 0)  # rounding may go below
    at_offsets = jnp.moveaxis(sums.at_offsets, -1, 0)
    previous, same, following = (mean(jnp.exp(x)) for x in at_offsets)
    largest = [mean(x >= sums.largest) for x in at_offsets]
    return Statistics(
        entropy=mean(entropy),
        perplexity=mean(jnp.exp(entropy)),
        squared_weights=mean(sums.squared_weights),
        largest_weight=mean(jnp.exp(sums.largest)),
        distance=mean(sums.distance),
        rms_distance=jnp.sqrt(mean(sums.squared_distance)),
        previous_position=previous,
        same_position=same,
        next_position=following,
        first_position=mean(sums.first_position),
        largest_at_previous=largest[0],
        largest_at_same=largest[1],
        largest_at_next=largest[2],
        chosen_positions=mean_or_none(sums.chosen_positions),
        same_token=mean_or_none(sums.same_token),
        induction=mean_or_none(sums.induction),
        received=received,
        received_gini=gini(received, unseen),
        num_queries=count,
        pooled=pooled,
    )


def gini(amounts: Array, left_out: Array | None = None) -> Array:
    """Returns the Gini coefficient of amounts, 0 where there is nothing.

    Args:
      amounts: `[..., S]`, at least 0.
      left_out: Booleans `[..., S]`, who has no share; None: nobody.

    Source: Sen 1973, On Economic Inequality, section 2.3.
    """
    if left_out is None:
        left_out = jnp.zeros(amounts.shape, bool)
    left_out = jnp.broadcast_to(left_out, amounts.shape)
    counted = (~left_out).sum(-1)
    ordered = jnp.sort(jnp.where(left_out, 0, amounts), axis=-1)  # those come first
    rank = jnp.cumsum(jnp.ones_like(ordered), -1) - left_out.sum(-1, keepdims=True)
    total = ordered.sum(-1)
    weighted = (jnp.maximum(rank, 0) * ordered).sum(-1)
    total = jnp.where(total > 0, total, jnp.inf)
    count = jnp.maximum(counted, 1)
    unequal = 2 * weighted / (count * total) - (count + 1) / count
    return jnp.where(jnp.isfinite(total), jnp.maximum(unequal, 0), 0)


def _check_fits(name, array, shape, kind):
    if array is None:
        return
    kinds = {bool: "booleans", jnp.integer: "integers"}
    is_kind = array.dtype == bool if kind is bool else jnp.issubdtype(array.dtype, kind)
    if array.shape != shape or not is_kind:
        raise ValueError(
            f"{name} must be {kinds[kind]} of shape {shape}, got {array.dtype} of "
            f"shape {array.shape}."
        )
