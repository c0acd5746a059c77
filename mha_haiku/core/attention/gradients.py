"""The hand-written gradient that the implementations of attention share.

With weights `P = exp(scores - logsumexp)` the gradient of a score is
`dS = P (dO V' - shift)`, where a row's `shift` is the product of its values and their
cotangent, less the cotangent of its logsumexp: so tiles of P can be recomputed from the
scores, and rows need no second pass. The rounding error of the logsumexp becomes a
factor of the row's weights: dO and the shift are multiplied by it, which costs nothing
per score.

Source: Dao et al. 2022 (FlashAttention), appendix B.2,
https://arxiv.org/abs/2205.14135.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from mha_haiku.core import positions
from mha_haiku.core.attention import products, scores
from mha_haiku.core.attention.inputs import Inputs, Weighting
from mha_haiku.core.attention.normalizers import LogSum

# In the pytree of a gradient, in the place of what is not differentiated.
NO_GRADIENT: Any = None


class RowGradients(NamedTuple):
    """The quantities of each query that the gradient needs."""

    # The cotangent of the values, and the number subtracted from the gradient of each
    # weight; both times exp(-remainder), see `LogSum`.
    values: Float[Array, "*B T H V"]
    shift: Float[Array, "*B H T"]
    # The rounded logsumexp of the scores, inf where the query has no gradient.
    logsumexp: Float[Array, "*B H T"]


class TileGradients(NamedTuple):
    """The gradients of a tile."""

    query: Float[Array, "*B R H K"]
    key: Float[Array, "*B C G K"]
    value: Float[Array, "*B C G V"]
    score: scores.Score
    scores: Float[Array, "*B H R C"]  # of the scores, and so of the bias


def tile_gradients(
    query: Float[Array, "*B R H K"],
    key: Float[Array, "*B C G K"],
    value: Float[Array, "*B C G V"],
    score: scores.Score,
    tile: Float[Array, "*B H R C"],
    kept: Float[Array, "*B H R C"] | None,
    rows: RowGradients,
) -> TileGradients:
    """Computes the gradients of a tile of scores.

    `kept` has the factors of dropout, or is None without dropout.
    """
    weights = jnp.exp(tile - rows.logsumexp[..., None])
    weights_grad = products.pair(rows.values, value)
    used = weights
    if kept is not None:
        used, weights_grad = weights * kept, weights_grad * kept
    scores_grad = weights * (weights_grad - rows.shift[..., None])
    # A masked value of 1e38 makes `weights_grad` infinite, and 0 x inf is NaN.
    scores_grad = jnp.where(weights == 0, 0, scores_grad)
    query_grad, key_grad, score_grad = score.gradients(query, key, scores_grad)
    value_grad = products.mix_transposed(used, rows.values, value.shape[-2])
    return TileGradients(query_grad, key_grad, value_grad, score_grad, scores_grad)


class Gradients(NamedTuple):
    """The gradients of attention: sums over its tiles."""

    query: Float[Array, "*B T H K"]
    key: Float[Array, "*B S G K"]
    value: Float[Array, "*B S G V"]
    bias: positions.ScoreBias | None  # None where it is not differentiated
    score: scores.Score


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """Gives `forward` the gradient `backward`.

    `forward(inputs, options)` returns values `[B..., T, H, V]`, the `LogSum` of `[B...,
    H, T]` and a pytree that the gradient needs; options are static.
    `backward(inputs, saved, rows, wants_bias, options)` returns `Gradients`.
    """
    forward = jax.jit(forward, static_argnums=1)
    backward = jax.jit(backward, static_argnums=(3, 4))

    def attend(inputs: Inputs, options: Any):
        def run(inputs: Inputs):
            values, logsumexp, saved = forward(inputs, options)
            return (values, logsumexp), (values, logsumexp, saved)

        def pull_back(
            arguments: tuple[Inputs], saved: tuple, is_wanted: tuple, cotangents: tuple
        ):
            (inputs,), (is_needed,) = arguments, is_wanted
            *results, saved = saved
            rows = _row_gradients(inputs, *results, *cotangents)
            # The gradient of the bias may be as large as the map, so it is computed
            # only where the bias is differentiated.
            wants_bias = bool(jax.tree.leaves(is_needed.weighting.bias))
            sums = backward(inputs, saved, rows, wants_bias, options)
            weighting = Weighting(
                NO_GRADIENT, sums.bias, sums.score, origin=NO_GRADIENT
            )
            return (
                Inputs(
                    sums.query.astype(inputs.query.dtype),
                    sums.key.astype(inputs.key.dtype),
                    sums.value.astype(inputs.value.dtype),
                    weighting,
                ),
            )

        return with_gradient(run, pull_back)(inputs)

    return attend


def _row_gradients(
    inputs: Inputs,
    values: Array,
    log_sum: LogSum,
    values_grad: Array | None,
    log_sum_grad: LogSum,
) -> RowGradients:
    logsumexp, remainder = log_sum
    has_gradient = jnp.isfinite(logsumexp)
    if inputs.nonfinite is None:  # then NaN propagates
        has_gradient |= jnp.isnan(logsumexp)
    lost, dtype = jnp.exp(-remainder), logsumexp.dtype
    if values_grad is None:
        values_grad = jnp.zeros_like(values)
    # The cotangent is multiplied by the factor here, once: keeping both would need a
    # second array of rows.
    is_row, factor = (jnp.moveaxis(x, -2, -1)[..., None] for x in (has_gradient, lost))
    values_grad = jnp.where(is_row, values_grad * factor.astype(values_grad.dtype), 0)
    shift = values_grad.astype(dtype) * values.astype(dtype)
    # Values of a row that the loss ignores may be infinite, and 0 x inf is NaN.
    shift = jnp.where(values_grad == 0, 0, shift).sum(-1)
    shift = jnp.moveaxis(shift, -1, -2)
    if log_sum_grad.logsumexp is not None:
        shift -= log_sum_grad.logsumexp * lost
    return RowGradients(
        values_grad,
        jnp.where(has_gradient, shift, 0),
        jnp.where(has_gradient, logsumexp, jnp.inf),
    )


def with_gradient(run: Callable, pull_back: Callable) -> Callable:
    """Gives a function the gradient `pull_back`, in reverse mode only.

    `run(*arguments)` returns the outputs and the residuals that the gradient needs.
    `pull_back(arguments, saved, is_wanted, cotangents)` returns the gradients of the
    arguments. `is_wanted` has the structure of the arguments, with None for each array
    that is not differentiated; a cotangent of zeros is None.
    """

    # With symbolic zeros JAX says which inputs are differentiated (`perturbed`) and
    # which cotangents are zero (`SymbolicZero`), so that neither costs anything.
    # Residuals are a pytree, in which a bool would be traced. None is structure, so it
    # can say "no" at trace time.
    def forward_rule(*primals: Any):
        is_wanted = jax.tree.map(lambda x: x.perturbed or None, primals)
        arguments = jax.tree.map(lambda x: x.value, primals)
        outputs, saved = run(*arguments)
        return outputs, (arguments, saved, is_wanted)

    def backward_rule(residuals: tuple, cotangents: Any):
        cotangents = jax.tree.map(
            lambda x: None if isinstance(x, SymbolicZero) else x, cotangents
        )
        return pull_back(*residuals, cotangents)

    function = jax.custom_vjp(lambda *arguments: run(*arguments)[0])
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return function
