"""What `look` and `edit` find of an attention: its scores, map, weights and heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from mha_haiku.core import masks, positions, sites
from mha_haiku.core.attention import attention_map, normalizers, scores
from mha_haiku.core.attention.weighting import Weighting
from mha_haiku.core.sites import recognition

Array = jax.Array
AttentionMap = attention_map.AttentionMap


def sited(
    values: Float[Array, "*B T H V"], map_: AttentionMap
) -> tuple[Float[Array, "*B T H V"], AttentionMap]:
    """Marks values and their map as sites of the program.

    An edit of "scores", "weights" or the "map" computes the values anew, which are the
    site "heads". The map that the program then continues with is NaN where its queries
    and keys do not give the edited weights; `look` shows the edited one.
    """
    map_, values = sites.faceted((map_, values), _FACETS, _without_weights)
    return sites.site("heads", values), map_


def map_of_weights(
    weights: Float[Array, "*B H T S"],
    *,
    query: Float[Array, "*B T H K"] | None = None,
    key: Float[Array, "*B S G K"] | None = None,
    value: Float[Array, "*B S G V"] | None = None,
    gates: Float[Array, "*B T H #V"] | None = None,
    are_shares: bool = True,
) -> AttentionMap:
    """Builds a map from weights that are already known, which it holds whole.

    Weights are not negative, and do not depend on the query and the key, which are for
    show. `are_shares` says whether a row sums to 1, or to 0 where every key is masked.
    """
    return _map_of_scores(
        *_logarithms(weights),
        query=query,
        key=key,
        value=value,
        normalizer=None if are_shares else normalizers.unnormalized(),
        gates=gates,
    )


@functools.partial(jax.jit, inline=True)  # traced once for all layers of a shape
def _logarithms(weights) -> tuple[Array, Array]:
    """Computes log weights, and for each row 0, or -inf if it has no weights."""
    weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    is_some = weights > 0
    logs = jnp.where(is_some, jnp.log(jnp.where(is_some, weights, 1)), -jnp.inf)
    return logs, jnp.where(is_some.any(-1), 0, -jnp.inf).astype(logs.dtype)


def _map_of_scores(scores_, logsumexp, *, query, key, value, normalizer, gates):
    """Builds the map of scores, which it holds whole as its bias."""
    *batch, num_heads, num_queries, num_keys = scores_.shape
    is_known = query is not None and key is not None
    zeros = functools.partial(jnp.zeros, dtype=scores_.dtype)
    return AttentionMap(
        query if is_known else zeros((*batch, num_queries, num_heads, 1)),
        key if is_known else zeros((*batch, num_keys, 1, 1)),
        logsumexp,
        Weighting(
            masks.full(),
            positions.as_bias(scores_).aligned(len(batch)),
            scores.dot_product(0.0),
            normalizer,
            gates,
        ),
        value,
    )


def _with_map(value, changed):
    _, values = value
    return changed, changed.outputs().astype(values.dtype)


def _with_weights(value, weights):
    own, _ = value
    changed = map_of_weights(weights, **_known(own), are_shares=False)
    return _with_map(value, changed)


def _with_scores(value, changed):
    own, values = value
    is_row = (changed > -jnp.inf).any(-1)
    logsumexp = jax.nn.logsumexp(jnp.where(is_row[..., None], changed, 0), -1)
    logsumexp = jnp.where(is_row, logsumexp, -jnp.inf)
    normalizer = own.weighting.normalizer
    if normalizer is not None:
        _, logsumexp = normalizer(values, logsumexp)
    changed = _map_of_scores(changed, logsumexp, **_known(own), normalizer=normalizer)
    return _with_map(value, changed)


def _known(own: AttentionMap) -> dict:
    known = {name: getattr(own, name) for name in ("query", "key", "value")}
    return known | {"gates": own.weighting.gates}


def _without_weights(value, changed):
    map_, _ = value
    unknown = dataclasses.replace(
        map_, logsumexp=jnp.full_like(map_.logsumexp, jnp.nan)
    )
    return unknown, changed[1]


_FACETS = (
    sites.Facet("scores", lambda value: value[0].scores(), _with_scores),
    sites.Facet("map", lambda value: value[0], _with_map),
    sites.Facet("weights", lambda value: value[0].weights(), _with_weights),
)

recognition.register(map_of_weights)
