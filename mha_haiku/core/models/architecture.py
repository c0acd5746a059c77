"""The fields of a model's config, with defaults, meanings and checks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_haiku.core import attention, checks, fields, modules
from mha_haiku.core.fields import OneOf, Section, field
from mha_haiku.core.modules import norms

# The valid values of fields, and what they mean: activations are arguments of
# `FeedForward`.
_GELU_TANH = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"activation": modules.gelu},
    "gelu_tanh": {"activation": _GELU_TANH},
    "relu": {"activation": jax.nn.relu},
    "swiglu": {"activation": jax.nn.silu, "gated": True},
    "geglu": {"activation": modules.gelu, "gated": True},
    "geglu_tanh": {"activation": _GELU_TANH, "gated": True},
}
OUTPUT_ACTIVATIONS = {"gelu": modules.gelu, "tanh": jnp.tanh, "relu": jax.nn.relu}
NORMS = {
    "layer_norm": modules.LayerNorm,
    "rms_norm": modules.RMSNorm,
    "none": modules.no_norm,
}
POSITIONS = tuple(modules.POSITION_SCHEMES)
PRECISIONS = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
}
FAMILIES = ("encoder", "causal", "set_classifier", "encoder_decoder")
KINDS = ("encoder", "decoder", "cross")  # of attention, in an encoder-decoder
POOLS = ("first", "mean")

GONE = {
    "embedding.image": None,
    "attention.differential": False,
    "attention.temperature": 1.0,
    "attention.soft_cap": None,
    "attention.qk_norm_over": "head",
    "feed_forward.parallel": False,
    "output.soft_cap": None,
}
"""Fields of earlier versions, and the values that mean the same as no such field."""


def a_list(name: str, value: Any) -> Any:
    """Checks that the value is a list, and returns it; else raises ConfigError."""
    if not isinstance(value, tuple):
        raise checks.ConfigError(f"{name} must be a list, got {value!r}.")
    return value


def _sinks(name: str, value: Any) -> Any:
    try:
        return value if value == "learned" else checks.number(name, value)
    except ValueError:
        raise checks.ConfigError(
            f"{name} must be None, 'learned' or a number, got {value!r}."
        ) from None


def _frequencies(name: str, value: Any) -> Any:
    for i, number in enumerate(a_list(name, value)):
        checks.non_negative_number(f"{name}[{i}]", number)
    return value


_SIZE = fields.integer(1, 2**20)
_SIZE_OR_NONE = fields.integer(0, 2**20)


class DecoderConfig(Section, path="config.model.decoder"):
    """The decoder of an encoder-decoder."""

    num_layers: int | None = field(
        None,
        "layers of an encoder_decoder's decoder, all with cross-attention too; "
        "defaults to num_layers",
        fields.integer(1, 10_000),
    )


class EmbeddingConfig(Section, path="config.model.embedding"):
    """Embeddings of tokens and positions."""

    positions: str = field("learned", "how positions are encoded", OneOf(POSITIONS))
    max_length: int = field(
        16,
        "number of learned positions, which is the longest possible input",
        fields.integer(1, 2**24),
    )
    scale: float = field(
        1.0,
        "factor of embeddings, before positions are added; not used for tied logits",
        checks.positive_number,
    )
    segments: int = field(
        0,
        "kinds of segments, which have an embedding each; 0 for none",
        fields.integer(0, 2**20),
    )
    norm: bool = field(False, "whether the sum of all embeddings is normalized")
    rotary_period: float = field(
        10_000.0,
        "largest period of rotary positions, over 2 pi",
        checks.positive_number,
    )
    frequencies: tuple[float, ...] | None = field(
        None,
        "radians per position of rotary pairs, a list of key_size / 2; by default "
        "rotary_period determines them",
        _frequencies,
    )


class AttentionConfig(Section, path="config.model.attention"):
    """The attention of each layer."""

    num_heads: int = field(
        1, "query heads of each layer; 0 for no attention part", _SIZE_OR_NONE
    )
    num_key_value_heads: int | None = field(
        None,
        "key/value heads of each layer, a divisor of num_heads; defaults to num_heads",
        _SIZE,
    )
    key_size: int | None = field(
        None,
        "query, key and value size of a head; defaults to model_size / num_heads",
        _SIZE,
    )
    score: str = field(
        "dot_product",
        "the function of a query and a key that gives a score",
        OneOf(modules.CHOICES["score"]),
    )
    scale: float | None = field(
        None,
        "factor of the dot products; defaults to 1 / sqrt(key_size)",
        checks.positive_number,
    )
    offset: float = field(
        0.0,
        "added to the dot products inside the sigmoid of score sigmoid; -log of "
        "the length makes rows sum to about 1 at initialization",
        checks.number,
    )
    normalizer: str = field(
        "softmax",
        "whether weights are divided by their sum (none: with score sigmoid)",
        OneOf(modules.CHOICES["normalizer"]),
    )
    sinks: float | str | None = field(
        None,
        "logit of a sink that takes attention from each head, learned or a number; "
        "no sink by default",
        _sinks,
    )
    gate: str = field(
        "none",
        "whether each head's output is multiplied by a sigmoid of the query's input",
        OneOf(modules.CHOICES["gate"]),
    )
    window: int | None = field(
        None,
        "positions that a query sees to either side (in a causal model or a decoder: "
        "before it); defaults to all; cross-attention sees all",
        fields.integer(0, 2**31 - 1),
    )
    with_bias: bool = field(True, "whether queries, keys and values have a bias")
    output_bias: bool = field(True, "whether the output projection has a bias")
    qk_norm: bool = field(False, "whether each head's queries and keys are normalized")
    smear_keys: bool = field(
        False,
        "whether each key is mixed with the one before it, in a learned ratio; such a "
        "model does not run token by token",
    )
    residual: bool = field(True, "whether attention adds its output to its input")
    implementation: str = field(
        "auto",
        "how attention is computed; auto chooses by length and device",
        OneOf(attention.IMPLEMENTATIONS),
    )
    kept_heads: tuple[tuple[int, ...], ...] | None = field(
        None,
        "in pruned models: a list of the remaining heads of each layer (encoder, then "
        "decoder, then cross-attention); defaults to all",
        a_list,
    )


class FeedForwardConfig(Section, path="config.model.feed_forward"):
    """The feed-forward part of each layer."""

    hidden_size: int = field(
        64,
        "hidden units of the feed-forward part; 0 for no such part",
        fields.integer(0, 2**22),
    )
    activation: str = field(
        "gelu",
        "activation function of the hidden units (with a gate: those in -glu)",
        OneOf(ACTIVATIONS),
    )
    with_bias: bool = field(True, "whether both projections have a bias")
    residual: bool = field(True, "whether this part adds its output to its input")
    hidden_sizes: tuple[int, ...] | None = field(
        None,
        "in pruned models: a list of the hidden units of each layer; defaults to all",
        a_list,
    )


class NormConfig(Section, path="config.model.norm"):
    """The norms."""

    kind: str = field("layer_norm", "how activations are normalized", OneOf(NORMS))
    epsilon: float = field(
        1e-5,
        "added to the variance, to avoid division by 0",
        checks.positive_number,
    )
    position: str = field(
        "pre",
        "where norms are: before the parts of a layer (pre), or after the sum (post)",
        OneOf(norms.PLACES),
    )


class OutputConfig(Section, path="config.model.output"):
    """The modules between the last layer and the logits."""

    pool: str | None = field(
        None,
        "what the logits read: every position (None), the first (first), or the "
        "mean of the valid positions (mean)",
        OneOf(POOLS),
    )
    hidden: str | None = field(
        None,
        "activation function of an extra layer before the logits: gelu, tanh or "
        "relu; no such layer by default",
        OneOf(OUTPUT_ACTIVATIONS),
    )
    norm: bool = field(False, "whether there is a norm just before the logits")
    logits: bool = field(True, "whether there are logits; a trained model needs them")
    tied: bool = field(
        False, "whether logits are dot products with the embeddings of tokens"
    )
    with_bias: bool = field(True, "whether the logits have a bias")


class ModelConfig(Section, path="config.model"):
    """The architecture of a model that `models.build` makes.

    Example:
      >>> config = mh.models.ModelConfig(num_layers=4, model_size=64)
      >>> config = config.replace(attention=dict(num_heads=8))
      >>> config.attention.num_heads, config.norm.position
      (8, 'pre')
    """

    family: str = field(
        "encoder",
        "what the model predicts: a class per position, the same from earlier "
        "positions only, an element of a set, or another sequence by a decoder",
        OneOf(FAMILIES),
    )
    num_layers: int = field(
        1,
        "layers of attention and a feed-forward part; in an encoder_decoder, layers "
        "of the encoder",
        fields.integer(1, 10_000),
    )
    decoder: DecoderConfig = DecoderConfig()
    model_size: int = field(
        32, "size of the vector of a position (the residual stream)", _SIZE
    )
    dropout_rate: float = field(
        0.0,
        "share of activations set to 0 in training, in [0, 1)",
        checks.fraction,
    )
    precision: str = field(
        "float32",
        "number format of the computation, with parameters in float32",
        OneOf(PRECISIONS),
    )
    scan_layers: bool = field(
        False,
        "whether all layers are one compiled loop, with stacked parameters: "
        "shorter compilation",
    )
    origin: str = field(
        "",
        "the config.json of transformers that the model was loaded with, which save "
        "writes again; empty for a model made here",
    )
    embedding: EmbeddingConfig = EmbeddingConfig()
    attention: AttentionConfig = AttentionConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = NormConfig()
    output: OutputConfig = OutputConfig()


def make_norm(config: ModelConfig) -> Callable[..., Callable[[jax.Array], jax.Array]]:
    """Returns a function that makes the norms of a model from their `name`."""
    return functools.partial(NORMS[config.norm.kind], config.norm.epsilon)
