"""What is asked of a whole map, answered by walks over its tiles.

`B...` batch axes, T query positions, S key positions, H heads. A function here answers
for the method of `AttentionMap` of its name, where its arguments are described.
"""

import math

import jax

from mha_haiku.core import checks, tiles
from mha_haiku.core.attention import observation
from mha_haiku.core.attention.attention_map import AttentionMap
from mha_haiku.core.attention.statistics import STATISTICS, Statistics
from mha_haiku.core.attention.tiled import (
    fold_gradient,
    observations,
    statistics_walk,
    sweep,
    views,
)

Array = jax.Array


def statistics(
    asked: AttentionMap,
    *,
    pooled: tuple[int, int] | None,
    query_offset: int | None,
    counted: Array | None,
    per_query: bool,
    **arrays: Array | None,
) -> Statistics:
    """Measures all statistics; `arrays` are positions, tokens and key_tokens."""
    origin = asked.checked_origin()
    if query_offset is not None:
        origin = tiles.Origin(query_offset)
    given = statistics_walk.given_of(
        asked.shape, origin=origin, counted=counted, **arrays
    )
    grid = None if pooled is None else observations.Grid.of(asked.shape, *pooled)
    return statistics_walk.statistics(
        _factors(asked),
        given,
        counted,
        registered=tuple(STATISTICS.values()),
        grid=grid,
        per_query=per_query,
        **_how(asked),
    )


def pooled(
    asked: AttentionMap, rows: int, columns: int, queries: slice, keys: slice
) -> Array:
    """Computes the mean mass of each cell, `[B..., H, P, Q]`."""
    grid = observations.Grid.of(asked.shape, rows, columns, queries, keys)
    return observations.pooled(_factors(asked), grid=grid, **_how(asked))


def top(asked: AttentionMap, k: int) -> observation.Top:
    """Finds the k largest weights of each query."""
    checks.integer_in("k", k, 1, asked.shape[-1])
    return observations.top(_factors(asked), k=k, **_how(asked))


def apply(asked: AttentionMap, x: Array) -> Array:
    """Multiplies the map by `x`."""
    x = observations.factor(asked.shape, x, axis=-1)
    return observations.apply(_factors(asked), x, **_how(asked))


def apply_transposed(asked: AttentionMap, y: Array) -> Array:
    """Multiplies the transposed map by `y`."""
    y = observations.factor(asked.shape, y, axis=-2)
    return observations.apply_transposed(_factors(asked), y, **_how(asked))


def divergence(asked: AttentionMap, other: AttentionMap | None) -> Array:
    """Computes the divergences of the heads, `[B..., H, H']`."""
    if other is not None:
        observations.check_comparable(asked.shape, other.shape)
        other = _factors(other)
    return observations.divergence(_factors(asked), other, **_how(asked))


def observe(
    asked: AttentionMap, observed: observation.Observation, given: observation.Given
) -> observation.Sums:
    """Runs an observation."""
    return fold_gradient.fold(observed, (_factors(asked),), given, **_how(asked))


def _factors(asked: AttentionMap) -> views.Factors:
    asked.checked_origin()
    scoring = asked.weighting.scoring()
    return views.Factors(asked.query, asked.key, scoring, asked.logsumexp)


def _how(asked: AttentionMap) -> dict:
    return {"sizes": _sizes(asked), "mesh": asked.mesh}


def _sizes(asked: AttentionMap) -> sweep.Sizes:
    # Narrower than for attention itself, as fewer tiles lie on the diagonal then; but
    # two such heads are taken together, or one would have too little work.
    largest = 2**18 if math.prod(asked.shape[:-2]) > 1 else 2**19
    backend = jax.default_backend()
    return sweep.default_sizes(asked.shape, asked.weighting, backend, largest)
