"""Attention by the whole matrix of scores: the fastest for short sequences."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mha_haiku.core import tiles
from mha_haiku.core.attention import gradients, products
from mha_haiku.core.attention.inputs import Inputs, Weighting
from mha_haiku.core.attention.normalizers import LogSum


def formula(
    inputs: Inputs, dropout_rate: float, finish: Weighting | None = None
) -> tuple[Float[Array, "*B T H V"], LogSum, tuple]:
    """Computes values, logsumexp and scores by operations that JAX differentiates."""
    query, key, value, weighting, nonfinite, _ = inputs.zeroed()
    rows, columns = _spans(inputs)
    tile = weighting.scores(query, key, *weighting.origin.at(rows, columns))
    if nonfinite is not None:
        is_nonfinite = nonfinite.pairs(rows, columns) & (tile > -jnp.inf)
        tile = jnp.where(is_nonfinite, jnp.nan, tile)
    largest = jnp.max(tile, axis=-1, keepdims=True, initial=-jnp.inf)
    if nonfinite is not None:
        # Rows of NaN are treated as fully masked until the end: in their gradient,
        # 0 x NaN would reach keys that other rows attend to.
        sees_nan = jnp.isnan(largest)
        tile, largest = (jnp.where(sees_nan, -jnp.inf, x) for x in (tile, largest))
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    weights = jnp.exp(tile - largest)
    total = weights.sum(-1, keepdims=True)
    logsumexp = LogSum.of(largest[..., 0], total[..., 0])
    total = jnp.where(total == 0, 1, total)
    if finish is not None:  # weights are normalized before the product
        shares = jnp.moveaxis(weights / total, -3, -2)  # as values: [..., T, H, S]
        shares, logsumexp = finish._replace(gates=None).finished(shares, logsumexp)
        weights, total = jnp.moveaxis(shares, -2, -3), jnp.ones_like(total)
    factors = _dropout(inputs, dropout_rate)
    weights = weights if factors is None else weights * factors
    # Sums are divided and not weights: T V numbers in place of T S.
    values = products.mix(weights, value) / jnp.moveaxis(total, -3, -2)
    if nonfinite is not None:
        values = jnp.where(jnp.moveaxis(sees_nan, -3, -2), jnp.nan, values)
        logsumexp = logsumexp.nan_where(sees_nan[..., 0])
    return values.astype(value.dtype), logsumexp, (tile,)


def _backward(
    inputs: Any,
    saved: tuple[Array],
    rows: gradients.RowGradients,
    wants_bias: bool,
    dropout_rate: float,
) -> gradients.Gradients:
    query, key, value, weighting, *_ = inputs.zeroed()
    (tile,) = saved
    whole = gradients.tile_gradients(
        query, key, value, weighting.score, tile, _dropout(inputs, dropout_rate), rows
    )
    bias = None
    if wants_bias:
        zeros = jax.tree.map(jnp.zeros_like, weighting.bias)
        at = weighting.origin.at(*_spans(inputs))
        bias = weighting.bias.add_gradient(zeros, whole.scores, *at)
    return gradients.Gradients(whole.query, whole.key, whole.value, bias, whole.score)


attend = gradients.differentiable(formula, _backward)


@tiles.pytree
class Dropout:
    """What is drawn of a map's weights: the same in all implementations on a device."""

    rng: Array
    rate: float = tiles.static()

    def factors(self, map_shape: tuple[int, ...]) -> Float[Array, "*B H T S"]:
        """Draws the factors of all weights; see `dropout_factors`."""
        rows, columns = (tiles.Span(0, size) for size in map_shape[-2:])
        factors = jax.vmap(
            lambda n: dropout_factors(self.rng, self.rate, n, rows, columns)
        )(jnp.arange(math.prod(map_shape[:-2])))
        return factors.reshape(map_shape)


def dropout_factors(
    rng: Array,
    rate: float,
    head: int | Array,
    rows: tiles.Positions,
    columns: tiles.Positions,
) -> Float[Array, "R C"]:
    """Draws the factor of each weight of a tile: 0 or 1 / (1 - rate).

    They are the same whatever tiles they are drawn in.
    """
    # Each weight has its key, folded from its head (over all examples), row and column.
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)  # a raw one, as `hk.next_rng_key` gives it
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.fold_in(rng, head), tiles.as_array(rows)
    )
    fold_columns = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(fold_columns, (0, None))(row_keys, tiles.as_array(columns))
    # A folded key is a hash already: its first word serves as the random bits.
    bits = jax.random.key_data(keys)[..., 0]
    is_kept = bits >= jnp.uint32(round(rate * 2**32))
    return is_kept.astype(jnp.float32) / (1 - rate)


def _spans(inputs: Inputs) -> tuple[tiles.Span, tiles.Span]:
    num_queries, num_keys = inputs.map_shape[-2:]
    return tiles.Span(0, num_queries), tiles.Span(0, num_keys)


def _dropout(inputs: Any, dropout_rate: float) -> Array | None:
    if not dropout_rate:
        return None
    return Dropout(inputs.rng, dropout_rate).factors(inputs.map_shape)
