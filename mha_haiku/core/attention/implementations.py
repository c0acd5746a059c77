"""Attention of queries to keys, by whichever implementation.

An implementation is a function of `Inputs` and the rate of dropout. Where devices share
its inputs, as in `sharded/`, it has what walks over such maps as its attribute `fold`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from mha_haiku.core import checks, masks, positions, site_primitive, tiles
from mha_haiku.core.attention import (
    attention_map,
    dense,
    kernels,
    map_sites,
    normalizers,
    scores,
)
from mha_haiku.core.attention.inputs import Inputs, Nonfinite, Weighting
from mha_haiku.core.attention.normalizers import LogSum
from mha_haiku.core.attention.tiled import blockwise

# From the inputs and the rate of dropout to values `[B..., T, H, V]` and the logsumexp
# `[B..., H, T]`, an array or a `LogSum`.
Implementation = Callable[[Inputs, float], tuple[Array, Array | LogSum]]

# Numbers of scores up to which the whole matrix is as fast as its tiles: measured on
# CPUs; on accelerators a guess that keeps the scores within a quarter of a GiB.
_DENSE_SCORES = {"cpu": 2**20}
_DENSE_SCORES_ON_ACCELERATORS = 2**26

# Whether heads attend one by one, by plain equations: so that some can be removed.
apart = jax.make_user_context(False)


def attend(
    query: Float[Array, "*B T H K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S G V"],
    *,
    mask: masks.Mask | Array | np.ndarray | None = None,
    bias: positions.ScoreBias | Array | np.ndarray | None = None,
    score: scores.Score | scores.ScoreFunction | None = None,
    normalizer: normalizers.Normalizer | None = None,
    gates: Array | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    first_query: int | Array = 0,
    implementation: str | Implementation = "auto",
) -> tuple[Float[Array, "*B T H V"], attention_map.AttentionMap]:
    """Computes `softmax(score(query, key) + bias) value` and the attention map.

    What is masked changes nothing: the outputs and gradients are the same bit for bit
    if a masked key or value is NaN or inf. A query that sees nothing gets zeros.
    Softmax is float32, or float64 for float64 inputs. Under jit a map that is not read
    costs nothing.

    Args:
      mask: A mask; or booleans or 0/1 integers, `[B..., T, S]` or `[B..., H, T, S]`;
        None: everything is seen. True means "may attend".
      bias: A bias of `positions`; or floats, `[B..., T, S]` or `[B..., H, T, S]`. A
        key whose bias is -inf is masked.
      score: Or a function from `[R, K]` queries and `[C, K]` keys of a head to their
        `[R, C]` scores; None: `scores.dot_product()`, scaled by 1 / sqrt(K).
      normalizer: What weights are over, as `attention.sink(logits)`; softmax when None.
        It acts behind any implementation.
      gates: `[B..., T, H, 1]` or `[B..., T, H, V]`, what values are multiplied by in
        the end; the map keeps them, and its weights are those without.
      dropout_rate: Share of the weights set to zero, in [0, 1); the map stays the clean
        one, and the weights that stay grow by 1 / (1 - dropout_rate).
      rng: The key of the dropout; required with it.
      first_query: The position of the first query, where they are the last T of S, say,
        for mask and bias: both are asked at absolute positions, at which the arrays
        inside them are indexed. May be traced.
      implementation: All give the same, at another cost. "dense" holds the `[B..., H,
        T, S]` scores; "blockwise" only tiles of them, skipping those that the mask
        rules out; `attention.Blockwise(rows=...)` is that with tiles of chosen sizes;
        "fused" is the kernel that JAX has for the accelerator, which knows some masks
        and dtypes only; "formula" is dense and differentiated by JAX itself, for
        forward mode (`jax.jvp`), which the others lack. "auto" is fused where that can
        do the call, else dense up to about a million scores on the CPU (2^26 on
        accelerators), and blockwise beyond. `attention.Sharded(mesh)` shares batch,
        heads and positions among the devices of a mesh.

    Returns:
      The values, and the map of shape `(B..., H, T, S)`.

    Raises:
      ValueError: If shapes do not fit, a mask is of floats, a bias is not, known
        lengths exceed S, dropout has no key, or the implementation cannot do this.

    Source: Vaswani et al. 2017, eq. 1, https://arxiv.org/abs/1706.03762; grouped heads:
    Ainslie et al. 2023, https://arxiv.org/abs/2305.13245.
    """
    query, key, value = _arrays(query, key, value)
    mask, first_query = masks.as_mask(mask), tiles.checked_first(first_query)
    stop = first_query + query.shape[-3] if isinstance(first_query, int) else None
    mask.check(query.shape[:-3], query.shape[-2], stop, key.shape[-3])
    bias, score = positions.as_bias(bias), scores.as_score(score)
    gates = None if gates is None else jnp.asarray(gates)
    origin = tiles.Origin(first_query)
    weighting = Weighting(mask, bias, score, normalizer, gates, origin)
    options = {"dropout_rate": dropout_rate, "rng": rng}
    return attend_within(
        query, key, value, weighting, implementation=implementation, **options
    )


def attend_within(
    query: Float[Array, "*B T H K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S G V"],
    weighting: Weighting,
    *,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str | Implementation = "auto",
) -> tuple[Float[Array, "*B T H V"], attention_map.AttentionMap]:
    """Attends like `attend`, with a mask that was checked already."""
    query, key, value = _arrays(query, key, value)
    weighting = weighting.aligned(query, key.shape[-3], value.shape[-1])
    implementation = named(implementation)
    checks.fraction("dropout_rate", dropout_rate)
    if dropout_rate and rng is None:
        raise ValueError(f"dropout_rate is {dropout_rate}, which needs a key in rng=.")

    if apart.value:
        key, value = (scores.repeat_heads(x, query.shape[-2]) for x in (key, value))
        inputs = Inputs(query, key, value, weighting.scoring(), rng=rng)
        values, log_sum, _ = dense.formula(inputs, dropout_rate, weighting)
        values, log_sum = weighting._replace(normalizer=None).finished(values, log_sum)
        return values, attention_map.AttentionMap(query, key, log_sum, weighting, value)
    nonfinite = None
    if not isinstance(weighting.mask, masks.Full):
        nonfinite = Nonfinite.of(query, key, value)
    rng = rng if dropout_rate else None
    inputs = Inputs(query, key, value, weighting.scoring(), nonfinite, rng)
    with jax.named_scope(site_primitive.SEEN):
        values, logsumexp = implementation(inputs, dropout_rate)
    values, log_sum = weighting.finished(values, LogSum.rounded(logsumexp))
    query, key, value, *_ = inputs.zeroed()
    fold = getattr(implementation, "fold", None)
    whole = attention_map.AttentionMap(query, key, log_sum, weighting, value, fold)
    dropout = None if rng is None else dense.Dropout(rng, dropout_rate)
    return map_sites.sited(values, whole, dropout)


def named(implementation: str | Implementation) -> Implementation:
    """Looks up an implementation by name; a function is returned unchanged."""
    if callable(implementation):
        return implementation
    checks.choice("implementation", implementation, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[implementation]


def chosen(inputs: Inputs, dropout_rate: float, platform: str) -> str:
    """Chooses the implementation that "auto" takes for a call, by name.

    It is "fused" where a kernel can do it, else "dense" where scores are few, and
    "blockwise" where they are many.
    """
    device = kernels.platform_name() if platform == jax.default_backend() else platform
    if kernels.refusal(inputs, dropout_rate, device) is None:
        return "fused"
    most = _DENSE_SCORES.get(platform, _DENSE_SCORES_ON_ACCELERATORS)
    return "dense" if math.prod(inputs.map_shape) <= most else "blockwise"


def register(name: str, implementation: Implementation) -> None:
    """Makes an implementation known to `attend` and to configs by a name."""
    IMPLEMENTATIONS[name] = implementation


def _auto(inputs: Inputs, dropout_rate: float) -> tuple[Array, Array | LogSum]:
    name = chosen(inputs, dropout_rate, jax.default_backend())
    return IMPLEMENTATIONS[name](inputs, dropout_rate)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "auto": _auto,
    "dense": dense.attend,
    "formula": lambda inputs, dropout_rate: dense.formula(inputs, dropout_rate)[:2],
    "blockwise": blockwise.Blockwise(),
    "fused": kernels.attend,
}


def _arrays(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, Array]:
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(
            "query, key and value must be [B..., T, H, K], [B..., S, G, K] and "
            f"[B..., S, G, V]; got {shapes}."
        )
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be of floats, got {array.dtype}.")
    batch_shape, (num_heads, key_size) = query.shape[:-3], query.shape[-2:]
    num_keys, num_key_heads = key.shape[-3:-1]
    if not batch_shape == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value disagree on batch axes: {shapes}.")
    if not key_size:
        raise ValueError(f"the size K per head must be at least 1: {shapes}.")
    if key.shape[-1] != key_size:
        raise ValueError(f"query and key disagree on the size K per head: {shapes}.")
    if value.shape[-3:-1] != (num_keys, num_key_heads):
        raise ValueError(f"key and value disagree on positions S or heads G: {shapes}.")
    if not num_key_heads or num_heads % num_key_heads:
        raise ValueError(f"the key heads G must divide the query heads H: {shapes}.")
    return query, key, value
