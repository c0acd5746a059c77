"""What `look` and `edit` find of an attention: its map, weights and heads.

`B...` batch axes, T query positions, S key positions, H query heads, V value size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mha_haiku import masks, positions
from mha_haiku.attention import attention_map, normalizers, scores
from mha_haiku.core import sites
from mha_haiku.core.sites import recognition

Array = jax.Array
AttentionMap = attention_map.AttentionMap


def sited(values: Array, map_: AttentionMap) -> tuple[Array, AttentionMap]:
    """Returns values `[B..., T, H, V]` and their map as sites of the program.

    An edit of "map" or "weights" computes the values anew, which are the site "heads".
    Where weights were edited, the map that the program goes on with, whose scores
    cannot give them, is NaN; `look` shows the edited one.
    """
    map_, values = sites.faceted((map_, values), _FACETS, _without_weights)
    return sites.site("heads", values), map_


def map_of_weights(
    weights: Array,
    *,
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    gates: Array | None = None,
    are_shares: bool = True,
) -> AttentionMap:
    """Returns the map of weights that are known themselves, which it holds whole.

    Args:
      weights: `[B..., H, T, S]`, not negative.
      query: `[B..., T, H, K]`, for show: weights do not depend on it; None: not known.
      key: `[B..., S, G, K]`, likewise.
      value: `[B..., S, G, V]`.
      gates: See `attend`.
      are_shares: Whether a row sums to 1, or to 0 where every key is masked.
    """
    *batch, num_heads, num_queries, num_keys = weights.shape
    dtype = jnp.promote_types(weights.dtype, jnp.float32)
    weights = weights.astype(dtype)
    is_known = query is not None and key is not None
    is_some = weights > 0
    logs = jnp.where(is_some, jnp.log(jnp.where(is_some, weights, 1)), -jnp.inf)
    return AttentionMap(
        query if is_known else jnp.zeros((*batch, num_queries, num_heads, 1), dtype),
        key if is_known else jnp.zeros((*batch, num_keys, 1, 1), dtype),
        jnp.where(is_some.any(-1), 0, -jnp.inf).astype(dtype),
        masks.full(),
        positions.as_bias(logs).aligned(len(batch)),
        scores.dot_product(0.0),
        value,
        normalizer=None if are_shares else normalizers.unnormalized(),
        gates=gates,
    )


def _with_map(value, changed):
    _, values = value
    return changed, changed.outputs().astype(values.dtype)


def _with_weights(value, weights):
    own, _ = value
    changed = map_of_weights(
        weights,
        query=own.query,
        key=own.key,
        value=own.value,
        gates=own.gates,
        are_shares=False,
    )
    return _with_map(value, changed)


def _without_weights(value, changed):
    map_, _ = value
    unknown = dataclasses.replace(
        map_, logsumexp=jnp.full_like(map_.logsumexp, jnp.nan)
    )
    return unknown, changed[1]


_FACETS = (
    sites.Facet("map", lambda value: value[0], _with_map),
    sites.Facet("weights", lambda value: value[0].weights(), _with_weights),
)

recognition.register(map_of_weights)
