"""The fields of a model's config: default, meaning, check; what values stand for."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku.core import attention, checks, fields, modules
from mha_haiku.core.fields import OneOf, Section, field
from mha_haiku.core.modules import norms


class Activation(NamedTuple):
    """What hidden units go through."""

    # Applied to the hidden units, or to the gate.
    activation: Callable[[jax.Array], jax.Array]
    # Whether the hidden units are multiplied by a gate, a linear map of its own.
    gated: bool = False


# The values that fields may have, and what they stand for.
_GELU_TANH = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS = {
    "gelu": Activation(modules.gelu),
    "gelu_tanh": Activation(_GELU_TANH),
    "relu": Activation(jax.nn.relu),
    "swiglu": Activation(jax.nn.silu, gated=True),
    "geglu": Activation(modules.gelu, gated=True),
    "geglu_tanh": Activation(_GELU_TANH, gated=True),
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
NORM_PLACES = norms.PLACES
# What queries and keys are normalized over: what makes their norms of any norm.
QK_NORMS = {"head": lambda make_norm: make_norm, "layer": modules.over_all_heads}
POOLS = ("first", "mean")


def a_list(name: str, value: Any) -> Any:
    """Checks that the value is a list, and returns it; else raises ConfigError."""
    if not isinstance(value, tuple):
        raise checks.ConfigError(f"{name} must be a list, got {value!r}.")
    return value


def _window(name: str, value: Any) -> Any:
    by_layer = (
        {f"{name}[{i}]": each for i, each in enumerate(value)}
        if isinstance(value, tuple)
        else {name: value}
    )
    for each, size in by_layer.items():
        if size is not None:
            checks.integer_in(each, size, 0, 2**31 - 1)
    return value


def _image(name: str, value: Any) -> Any:
    if not isinstance(value, tuple) or len(value) != 4:
        raise checks.ConfigError(f"{name} must be a list of 4 integers, got {value!r}.")
    for i, size in enumerate(value):
        checks.positive_integer(f"{name}[{i}]", size)
    return value


def _sinks(name: str, value: Any) -> Any:
    try:
        return value if value == "learned" else checks.number(name, value)
    except ValueError:
        raise checks.ConfigError(
            f"{name} must be None, 'learned' or a number, got {value!r}."
        ) from None


def _frequencies(name: str, value: Any) -> Any:
    by_layer = any(isinstance(row, tuple) for row in a_list(name, value))
    for i, row in enumerate(value if by_layer else [value]):
        row_name = f"{name}[{i}]" if by_layer else name
        for j, each in enumerate(a_list(row_name, row)):
            checks.non_negative_number(f"{row_name}[{j}]", each)
    return value


_SIZE = fields.integer(1, 2**20)
_SIZE_OR_NONE = fields.integer(0, 2**20)


class DecoderConfig(Section, path="config.model.decoder"):
    """The decoder of an encoder-decoder."""

    num_layers: int | None = field(
        None,
        "layers of an encoder_decoder's decoder, each with cross-attention too; "
        "None: num_layers",
        fields.integer(1, 10_000),
    )


class EmbeddingConfig(Section, path="config.model.embedding"):
    """Embeddings of tokens and positions."""

    positions: str = field(
        "learned", "how the order of positions enters the model", OneOf(POSITIONS)
    )
    max_length: int = field(
        16,
        "number of learned positions, the longest input they allow",
        fields.integer(1, 2**24),
    )
    scale: float = field(
        1.0,
        "factor of embeddings, before positions are added; not of tied logits",
        checks.positive_number,
    )
    segments: int = field(
        0,
        "kinds of segments, each with an embedding; 0: none",
        fields.integer(0, 2**20),
    )
    norm: bool = field(False, "whether the sum of all embeddings is normalized")
    rotary_period: float = field(
        10_000.0,
        "largest period of rotary positions, over 2 pi",
        checks.positive_number,
    )
    frequencies: tuple | None = field(
        None,
        "radians per position of rotary pairs, a list of key_size / 2, or a list "
        "of such lists for each layer; None: from rotary_period",
        _frequencies,
    )
    image: tuple[int, ...] | None = field(
        None,
        "images that the inputs are patches of: a list of channels, height, width and "
        "patch size; None: inputs are not patches",
        _image,
    )


class AttentionConfig(Section, path="config.model.attention"):
    """The attention of each layer."""

    num_heads: int = field(
        1, "query heads of each layer; 0: no attention part", _SIZE_OR_NONE
    )
    num_key_value_heads: int | None = field(
        None,
        "key/value heads of each layer, a divisor of num_heads; None: num_heads",
        _SIZE,
    )
    key_size: int | None = field(
        None, "query, key and value size of a head; None: model_size / num_heads", _SIZE
    )
    score: str = field(
        "dot_product",
        "how a query and a key give a score",
        OneOf(modules.CHOICES["score"]),
    )
    scale: float | None = field(
        None,
        "factor of the dot products; None: 1 / sqrt(key_size)",
        checks.positive_number,
    )
    soft_cap: float | None = field(
        None,
        "bounds scores s to soft_cap * tanh(s / soft_cap); None: no bound",
        checks.positive_number,
    )
    temperature: float = field(
        1.0,
        "scores are divided by it, before biases of positions are added: below 1 "
        "attention is sharper",
        checks.positive_number,
    )
    offset: float = field(
        0.0,
        "added to the dot products inside the sigmoid of score sigmoid; -log of "
        "the length makes rows sum to about 1 at first",
        checks.number,
    )
    normalizer: str = field(
        "softmax",
        "whether weights are divided by their sum, or not (scores sigmoid and linear)",
        OneOf(modules.CHOICES["normalizer"]),
    )
    sinks: float | str | None = field(
        None,
        "logit of a sink that each head may leave attention at, learned or a "
        "number; None: no sink",
        _sinks,
    )
    gate: str = field(
        "none",
        "whether heads' outputs are multiplied by a sigmoid of the query's input, "
        "per head or per channel",
        OneOf(modules.CHOICES["gate"]),
    )
    window: int | tuple[int | None, ...] | None = field(
        None,
        "how many positions to either side a query sees (a causal model or a "
        "decoder: before it); None: all; or a list of these, one for each layer; "
        "cross-attention sees all",
        _window,
    )
    with_bias: bool = field(True, "whether queries, keys and values have a bias")
    output_bias: bool = field(True, "whether the output projection has a bias")
    qk_norm: bool = field(False, "whether queries and keys are normalized")
    qk_norm_over: str = field(
        "head",
        "what qk_norm takes the mean square over: each head, or all of the layer",
        OneOf(QK_NORMS),
    )
    differential: bool = field(
        False, "whether heads are differences of two maps, of which num_heads has both"
    )
    smear_keys: bool = field(
        False, "whether each key is mixed with the one before it, by a learned share"
    )
    residual: bool = field(True, "whether attention adds its output to its input")
    implementation: str = field(
        "auto",
        "how attention is computed, auto by length and device",
        OneOf(attention.IMPLEMENTATIONS),
    )
    kept_heads: tuple[tuple[int, ...], ...] | None = field(
        None,
        "pruned models: a list of the heads left in each layer (encoder, decoder, "
        "cross-attention in turn); None: all",
        a_list,
    )


class FeedForwardConfig(Section, path="config.model.feed_forward"):
    """The feed-forward part of each layer."""

    hidden_size: int = field(
        64,
        "hidden units of the feed-forward part; 0: no such part",
        fields.integer(0, 2**22),
    )
    activation: str = field(
        "gelu",
        "activation function of the hidden units (with a gate: those in -glu)",
        OneOf(ACTIVATIONS),
    )
    with_bias: bool = field(True, "whether both projections have a bias")
    residual: bool = field(True, "whether this part adds its output to its input")
    parallel: bool = field(
        False, "whether this part reads what attention reads, and both are added to it"
    )
    hidden_sizes: tuple[int, ...] | None = field(
        None,
        "pruned models: a list of the hidden units of each layer; None: all",
        a_list,
    )


class NormConfig(Section, path="config.model.norm"):
    """The norms."""

    kind: str = field("layer_norm", "how activations are normalized", OneOf(NORMS))
    epsilon: float = field(
        1e-5,
        "added to the variance, so that no division is by 0",
        checks.positive_number,
    )
    position: str = field(
        "pre",
        "where norms stand: before the parts of a layer (pre), after the sum "
        "(post), before and after a part (both), after a part (reordered)",
        OneOf(NORM_PLACES),
    )


class OutputConfig(Section, path="config.model.output"):
    """What stands between the last layer and the logits."""

    pool: str | None = field(
        None,
        "what the logits read: each position (None), the first one (first), or the "
        "mean of the valid ones (mean)",
        OneOf(POOLS),
    )
    hidden: str | None = field(
        None,
        "activation function of one more layer before the logits, of gelu, tanh "
        "and relu; None: no such layer",
        OneOf(OUTPUT_ACTIVATIONS),
    )
    norm: bool = field(False, "whether what the logits read is normalized last")
    logits: bool = field(True, "whether there are logits; a trained model needs them")
    tied: bool = field(
        False, "whether logits are dot products with the embeddings of tokens"
    )
    with_bias: bool = field(True, "whether the logits have a bias")
    soft_cap: float | None = field(
        None,
        "bounds logits x to soft_cap * tanh(x / soft_cap); None: no bound",
        checks.positive_number,
    )


class ModelConfig(Section, path="config.model"):
    """A model, as `models.build` makes it.

    Example:
      >>> config = mh.models.ModelConfig(num_layers=4, model_size=64)
      >>> config = config.replace(attention=dict(num_heads=8))
      >>> config.attention.num_heads, config.norm.position
      (8, 'pre')
    """

    family: str = field(
        "encoder",
        "what it predicts: a class per position, the same from earlier positions only, "
        "an element of a set, or another sequence, from which a decoder looks at it",
        OneOf(FAMILIES),
    )
    num_layers: int = field(
        1,
        "layers, each of attention and a feed-forward part; the encoder's layers "
        "where the family is encoder_decoder",
        fields.integer(1, 10_000),
    )
    decoder: DecoderConfig = DecoderConfig()
    model_size: int = field(
        32, "size of the vector of a position (the residual stream)", _SIZE
    )
    dropout_rate: float = field(
        0.0,
        "share of activations that dropout sets to 0 in training, in [0, 1)",
        checks.fraction,
    )
    precision: str = field(
        "float32",
        "number format of the computation, with parameters in float32",
        OneOf(PRECISIONS),
    )
    rematerialize: bool = field(
        False, "whether to compute layers again for the gradient, which saves memory"
    )
    scan_layers: bool = field(
        False,
        "whether all layers are one compiled loop, with stacked parameters: "
        "shorter compilation",
    )
    embedding: EmbeddingConfig = EmbeddingConfig()
    attention: AttentionConfig = AttentionConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = NormConfig()
    output: OutputConfig = OutputConfig()


def make_norm(config: ModelConfig) -> Callable[..., Callable[[jax.Array], jax.Array]]:
    """Returns the function that makes the norms of a model from their `name`."""
    return functools.partial(NORMS[config.norm.kind], config.norm.epsilon)
