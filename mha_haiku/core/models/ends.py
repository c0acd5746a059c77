"""The two ends of a model: from inputs to the first layer, from the last to logits.

B batch, T positions, D width, C classes. `embedding` is a table of vectors by token, or
a linear map of features; tied logits read the table once more. Modules and sites of a
decoder have names of their own.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from mha_haiku.core import modules, sites
from mha_haiku.core.models import architecture
from mha_haiku.core.models.architecture import ModelConfig

Array = jax.Array

OUTPUT_MODULES = ("output_hidden", "output_norm", "logits")
"""Names of the modules behind the last layer: what a model predicts is theirs."""


def make_embedding(
    config: ModelConfig, num_tokens: int | None, *, decoder: bool = False
) -> hk.Module:
    """Returns what embeds tokens, or features where there are no `num_tokens`."""
    name = _prefix(decoder) + "embedding"
    if num_tokens is None:
        return hk.Linear(config.model_size, name=name)
    return modules.TokenEmbedding(num_tokens, config.model_size, name=name)


def embedded(
    config: ModelConfig,
    embedding: hk.Module,
    inputs: Array,
    segments: Array | None = None,
    *,
    decoder: bool = False,
    first: int | Array = 0,
) -> Array:
    """Embeds inputs, adds positions and segments, and normalizes: `[B, T, D]`.

    Inputs are `[B, T]` tokens or `[B, T, ...]` features, the first at position `first`;
    segments `[B, T]` integers. It is the site "embedding", of a decoder
    "decoder_embedding".
    """
    own, prefix = config.embedding, _prefix(decoder)
    x = embedding(inputs)
    if own.scale != 1:
        x = x * own.scale
    x = sites.site(prefix + "token_embedding", x)
    with_positions = modules.PositionScheme.of(own).embed
    if with_positions is not None:
        x = with_positions(x, first, prefix)
    if own.segments and not decoder:
        table = modules.TokenEmbedding(
            own.segments,
            config.model_size,
            name="segments",
            w_init=hk.initializers.RandomNormal(0.02),
        )
        x = x + table(jnp.zeros(x.shape[:-1], int) if segments is None else segments)
    x = _normed(config, own.norm, prefix + "embedding_norm", x)
    return sites.site(prefix + "embedding", x)


def _prefix(decoder: bool) -> str:
    return "decoder_" if decoder else ""


def valid(inputs: Array, lengths: Array | None) -> Array | None:
    """Returns the valid positions `[B, T]` of inputs `[B, T, ...]`; None: all are."""
    if lengths is None:
        return None
    return jnp.arange(inputs.shape[1])[None, :] < jnp.asarray(lengths)[:, None]


def zeroed(inputs: Array, valid: Array | None) -> Array:
    """Replaces padding by zeros, so that NaN there reaches no gradient."""
    if valid is None:
        return inputs
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (inputs.ndim - 2)), inputs, 0)


def logits(
    config: ModelConfig,
    embedding: hk.Module,
    x: Array,
    valid: Array | None,
    num_classes: int,
    policy: jmp.Policy,
) -> Array:
    """Returns the logits: `[B, T, C]`, pooled `[B, C]`, of a set classifier `[B, T]`.

    They are of `x`, `[B, T, D]`, which the last layer returns, and the site "logits".
    """
    own, is_set = config.output, config.family == "set_classifier"
    x = _pooled(own.pool, x, valid)
    if own.hidden is not None:
        hidden = hk.Linear(config.model_size, name="output_hidden")(x)
        x = architecture.OUTPUT_ACTIVATIONS[own.hidden](hidden)
    x = _normed(config, own.norm, "output_norm", x)
    if own.tied:
        x = embedding.logits(x, num_classes)
        x = modules.Bias(name="logits")(x) if own.with_bias else x
    else:
        x = hk.Linear(1 if is_set else num_classes, own.with_bias, name="logits")(x)
    x = policy.cast_to_output(x[..., 0] if is_set else x)
    if own.soft_cap is not None:
        x = sites.site("uncapped_logits", x)
        x = own.soft_cap * jnp.tanh(x / own.soft_cap)
    x = jnp.where(valid, x, -jnp.inf) if is_set and valid is not None else x
    return sites.site("logits", x)


def _normed(config, is_normed: bool, name: str, x: Array) -> Array:
    return architecture.make_norm(config)(name=name)(x) if is_normed else x


def _pooled(pool: str | None, x: Array, valid: Array | None) -> Array:
    """Pools `[B, T, D]` to `[B, D]`; returns x itself without pooling."""
    if pool == "first":
        return x[:, 0]
    if pool == "mean":
        counts = jnp.ones(x.shape[:2], bool) if valid is None else valid
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        total = jnp.where(counts[..., None], x, 0).sum(1, dtype=dtype)
        return (total / jnp.maximum(counts.sum(1), 1)[:, None]).astype(x.dtype)
    return x
