"""Statistics of causal attention weights: computed blockwise, or of whole weights.

T query positions, S key positions (here T), H heads.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import jax_programs, sizes

_POOLED = (32, 32)


def prepare(
    use: str, size: int, core: Mapping[str, Any], implementation: str = "auto"
) -> worker.Program:
    """Returns calls of attention, forward.

    Args:
      use: "forward" for only the values; "statistics" for the map's statistics too; or
        "materialized" for both from weights as in the formula.
      core: Fields of `sizes.CoreSize`.
    """
    core = sizes.CoreSize(**core)
    attend = functools.partial(
        mh.attend, mask=mh.masks.causal(), implementation=implementation
    )

    def forward(query, key, value):
        return attend(query, key, value)[0]

    def statistics(query, key, value):
        values, attention_map = attend(query, key, value)
        return values, attention_map.statistics(pooled=_POOLED)

    uses = {
        "forward": forward,
        "statistics": statistics,
        "materialized": materialized,
    }
    arrays = tuple(jax_programs.normal(seed, core.shape) for seed in (2, 3, 4))
    return jax_programs.calls_of(uses[use], arrays, case="forward", calls=size)


def materialized(query: Array, key: Array, value: Array) -> tuple[Array, dict]:
    """Returns the values, and statistics under the names of mha_haiku."""
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(jax_programs.causal(query.shape[1]), scores, -jnp.inf)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bhts,bshk->bthk", weights, value), _statistics(weights)


def _statistics(weights) -> dict[str, Array]:
    """Returns all numbers from weights `[B, H, T, T]`."""
    length = weights.shape[-1]
    positions = jnp.arange(length)
    offsets = positions - positions[:, None]
    largest_at = weights.argmax(-1) - positions
    by_query = {
        "entropy": jax.scipy.special.entr(weights).sum(-1),
        "squared_weights": (weights**2).sum(-1),
        "largest_weight": weights.max(-1),
        "distance": (weights * abs(offsets)).sum(-1),
        "own_position": jnp.diagonal(weights, 0, -2, -1),
        "first_position": weights[..., 0],
        "largest_at_previous": largest_at == -1,
        "largest_at_own": largest_at == 0,
        "largest_at_next": largest_at == 1,
    }
    rows, columns = _POOLED
    cells = weights.reshape(
        *weights.shape[:-2], rows, length // rows, columns, length // columns
    )
    return {
        **{name: numbers.mean(-1) for name, numbers in by_query.items()},
        "rms_distance": jnp.sqrt((weights * offsets**2).sum(-1).mean(-1)),
        "previous_position": jnp.diagonal(weights, -1, -2, -1).sum(-1) / length,
        "next_position": jnp.diagonal(weights, 1, -2, -1).sum(-1) / length,
        "received": weights.sum(-2),
        "pooled": cells.sum(-1).mean(-2),
    }
