"""The sites of attention for `look` and `edit`: scores, map, weights and heads."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from mha_haiku.core import masks, positions, site_primitive, tiles
from mha_haiku.core.attention import attention_map, dense, normalizers, products, scores
from mha_haiku.core.attention.inputs import Weighting
from mha_haiku.core.attention.normalizers import LogSum

AttentionMap = attention_map.AttentionMap
# Lower scores, relative to the largest of a row, stand for a mask: programs write -1e4,
# -1e9, the lowest float or -inf, or add these.
_MASKED = -5e3
_Value = tuple[AttentionMap, Array, dense.Dropout | None]  # of the site


def sited(
    values: Float[Array, "*B T H V"],
    map_: AttentionMap,
    dropout: dense.Dropout | None = None,
) -> tuple[Float[Array, "*B T H V"], AttentionMap]:
    """Marks values and their map as sites of the program.

    An edit of "scores", "weights" or the "map" recomputes the values: weights, with any
    dropout, times values, times gates. They are the site "heads". The map that the
    program then continues with is NaN where its queries and keys do not give the edited
    weights; `look` shows the edited map.
    """
    map_, values, _ = site_primitive.faceted(
        (map_, values, dropout), _FACETS, _without_weights
    )
    return site_primitive.site("heads", values), map_


def map_of_weights(
    weights: Float[Array | np.ndarray, "*B H T S"],
    *,
    query: Float[Array, "*B T H K"] | None = None,
    key: Float[Array, "*B S G K"] | None = None,
    value: Float[Array, "*B S G V"] | None = None,
    gates: Float[Array, "*B T H #V"] | None = None,
    seen: Bool[Array, "*#B #H T S"] | None = None,
    largest_scores: Float[Array, "*B H T"] | None = None,
) -> AttentionMap:
    """Builds a map that holds the whole array of known weights.

    Weights may have any sign; the query and the key are only for display. `seen` marks
    the keys that the mask allows, by default all.
    """
    weights = jnp.asarray(weights)
    normalizer = normalizers.Measured(normalizers.are_shares(weights).all(-1))
    weights = weights.astype(products.accumulation_dtype(weights.dtype))
    log_sum = LogSum.rounded(jnp.zeros(weights.shape[:-1], weights.dtype))
    log_sum = log_sum.nan_where(jnp.isnan(weights).any(-1))
    parts = {"query": query, "key": key, "value": value, "gates": gates}
    map_ = _map_of(weights, seen, log_sum, Known(0.0, None), normalizer, parts)
    return dataclasses.replace(map_, largest_scores=largest_scores)


def map_of_recognized(
    weights: Float[Array, "*B H T S"],
    scores: Float[Array, "*B H T S"] | None = None,
    **factors: Any,
) -> AttentionMap:
    """Builds the map of weights whose mask is not known, as `map_of_weights` does.

    A key without weight is masked, unless its score, of a softmax, is low enough for a
    weight that is rounded to 0, and not as low as the scores that stand for a mask.
    """
    seen = seen_by(weights, scores)
    # Scores that stand for a mask are below all others. The smallest of the negatives,
    # as XLA would join the maximum with the softmax's, and round the program otherwise.
    largest = None if scores is None else -jnp.min(-scores, -1)
    return map_of_weights(weights, seen=seen, largest_scores=largest, **factors)


def seen_by(weights: Array, scores: Array | None) -> Array:
    """Finds the keys that recognized weights `[B..., H, T, S]` are not masked at."""
    seen = weights != 0
    if scores is None:
        return seen
    tiny = max(float(jnp.finfo(x.dtype).tiny) for x in (weights, scores))
    largest = scores.max(-1, keepdims=True, initial=-jnp.inf)
    below = scores - jnp.where(jnp.isfinite(largest), largest, 0)
    return seen | ((below < math.log(tiny)) & (below > _MASKED))


@tiles.pytree
class Known(scores.DotProduct):
    """The score of a map whose weights are known: they are its bias.

    As a score of queries and keys it is a dot product with scale 0.
    """

    is_kept = False
    map_of: ClassVar[str] = "of weights computed elsewhere"

    def __call__(self, query: Array, key: Array) -> Array:
        shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        return jnp.zeros(shape, products.accumulation_dtype(query.dtype))

    def gradients(
        self, query: Array, key: Array, cotangent: Array
    ) -> tuple[Array, Array, Self]:
        del cotangent
        return jnp.zeros_like(query), jnp.zeros_like(key), self

    def sees(self, logsumexp: Array, weighting: Weighting) -> Array:
        # A row of zeros sees nothing, though its weights can be differentiated.
        rows = weighting.origin.rows(tiles.Span(0, logsumexp.shape[-1]))
        bias = weighting.bias
        assert isinstance(bias, positions.DenseBias)  # see `_map_of`
        has_weights = (tiles.take(bias.values, rows, -2) != 0).any(-1)
        return has_weights & super().sees(logsumexp, weighting)

    def weights(self, relative: Array) -> Array:
        return jnp.where(relative == -jnp.inf, 0, relative)

    def log_weights(self, relative: Array) -> Array:
        weights = self.weights(relative)
        logs = jnp.log(jnp.where(weights == 0, 1, weights))  # NaN if negative
        return jnp.where(weights == 0, -jnp.inf, logs)


def _map_of(
    scores_: Array,
    seen: Array | None,
    log_sum: LogSum,
    score: scores.Score,
    normalizer: normalizers.Normalizer | None,
    parts: dict,
) -> AttentionMap:
    """Builds a map that holds the whole array of scores, as its bias, and its mask."""
    *batch, num_heads, num_queries, num_keys = scores_.shape
    query, key = parts["query"], parts["key"]
    if query is None or key is None:
        query = jnp.zeros((*batch, num_queries, num_heads, 1), scores_.dtype)
        key = jnp.zeros((*batch, num_keys, 1, 1), scores_.dtype)
    bias = positions.as_bias(scores_)
    bias = bias and bias.aligned(len(batch))
    mask = masks.as_mask(seen).aligned(len(batch))
    weighting = Weighting(mask, bias, score, normalizer, parts["gates"])
    return AttentionMap(query, key, log_sum, weighting, parts["value"])


def _heads(
    weights: Array, map_: Any, values: Array, dropout: dense.Dropout | None
) -> Array:
    """Computes the heads: weights, with dropout, times values, times gates."""
    if dropout is not None:
        weights = weights * dropout.factors(weights.shape)
    heads = products.mix(weights, map_.value).astype(values.dtype)
    gates = map_.weighting.gates
    return heads if gates is None else heads * gates


def _with_map(value: _Value, changed: AttentionMap) -> _Value:
    _, values, dropout = value
    if dropout is None:
        heads = changed.outputs().astype(values.dtype)
    else:
        heads = _heads(changed.weights(), changed, values, dropout)
    return changed, heads, dropout


def _with_weights(value: _Value, weights: Array) -> _Value:
    map_, values, dropout = value
    seen = _allowed(map_)
    seen = None if seen is None else seen | (weights != 0)
    changed = map_of_weights(weights, **_known(map_), seen=seen)
    return changed, _heads(weights, map_, values, dropout), dropout


def _with_scores(value: _Value, changed: Any) -> _Value:
    map_, values, dropout = value
    largest = jnp.max(changed, axis=-1, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    log_sum = LogSum.of(largest, jnp.exp(changed - largest[..., None]).sum(-1))
    normalizer = map_.weighting.normalizer
    if normalizer is not None:
        _, log_sum = normalizer(values, log_sum)
    parts, seen = _known(map_), changed != -jnp.inf
    score = scores.dot_product(0.0)
    changed = _map_of(changed, seen, log_sum, score, normalizer, parts)
    return changed, _heads(changed.weights(), map_, values, dropout), dropout


def _known(map_: AttentionMap) -> dict:
    parts = {name: getattr(map_, name) for name in ("query", "key", "value")}
    return parts | {"gates": map_.weighting.gates}


def _allowed(map_: AttentionMap) -> Array | None:
    """Computes the whole mask, to fit `[B..., H, T, S]`; None if all is allowed."""
    mask, (*_, num_queries, num_keys) = map_.weighting.mask, map_.shape
    if isinstance(mask, masks.Full):
        return None
    at = map_.checked_origin().at(jnp.arange(num_queries), jnp.arange(num_keys))
    return tiles.lifted(mask.aligned_tile(*at), map_.ndim)


def _without_weights(value: _Value, changed: _Value) -> _Value:
    map_, *_ = value
    nan = jnp.full_like(map_.logsumexp, jnp.nan)
    unknown = dataclasses.replace(map_, log_sum=LogSum.rounded(nan))
    return unknown, *changed[1:]


_FACETS = (
    site_primitive.Facet("scores", lambda value: value[0].scores(), _with_scores),
    site_primitive.Facet("map", lambda value: value[0], _with_map),
    site_primitive.Facet("weights", lambda value: value[0].weights(), _with_weights),
)
