"""The fields of a model's config: default, meaning, check; and what values stand for.

What they say of layers and heads is in `parts.py`; checks of two fields together are in
`consistency.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku.core import attention, checks, fields, modules
from mha_haiku.core.fields import Field, OneOf
from mha_haiku.core.modules import norms

if TYPE_CHECKING:
    import ml_collections


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
    """Returns the value, or raises ConfigError where it is no list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise checks.ConfigError(f"{name} must be a list, got {value!r}.")
    return value


def _window(name: str, value: Any) -> Any:
    check = fields.optional(fields.integer(0, 2**31 - 1))
    if not is_list(value):
        return check(name, value)
    for i, each in enumerate(value):
        check(f"{name}[{i}]", each)
    return value


def _sinks(name: str, value: Any) -> Any:
    if value == "learned":
        return value
    with contextlib.suppress(ValueError):
        return checks.number(name, value)
    raise checks.ConfigError(
        f"{name} must be None, 'learned' or a number, got {value!r}."
    )


def _frequencies(name: str, value: Any) -> Any:
    by_layer = any(map(is_list, a_list(name, value)))
    for i, row in enumerate(value if by_layer else [value]):
        own = f"{name}[{i}]" if by_layer else name
        for j, each in enumerate(a_list(own, row)):
            checks.non_negative_number(f"{own}[{j}]", each)
    return value


def is_list(value: Any) -> bool:
    """Returns whether a field has a list, as of one value per layer."""
    return isinstance(value, list | tuple)


_SIZE = fields.integer(1, 2**20)
_SIZE_OR_NONE = fields.integer(0, 2**20)

FIELDS = {
    "family": Field(
        "encoder",
        "what it predicts: a class per position, the same from earlier positions only, "
        "an element of a set, or another sequence, from which a decoder looks at it",
        OneOf(FAMILIES),
    ),
    "num_layers": Field(
        1,
        "layers, each of attention and a feed-forward part; of an encoder_decoder "
        "those of the encoder",
        fields.integer(1, 10_000),
    ),
    "decoder": {
        "num_layers": Field(
            None,
            "layers of an encoder_decoder's decoder, each with cross-attention too; "
            "None: num_layers",
            fields.optional(fields.integer(1, 10_000)),
            int,
        ),
    },
    "model_size": Field(
        32, "size of the vector of a position (the residual stream)", _SIZE
    ),
    "dropout_rate": Field(
        0.0,
        "share of activations that dropout sets to 0 in training, in [0, 1)",
        checks.fraction,
    ),
    "precision": Field(
        "float32",
        "number format of the computation, with parameters in float32",
        OneOf(PRECISIONS),
    ),
    "rematerialize": Field(
        False,
        "whether to compute layers again for the gradient, which saves memory",
        fields.boolean,
    ),
    "scan_layers": Field(
        False,
        "whether all layers are one compiled loop, with stacked parameters: "
        "shorter compilation",
        fields.boolean,
    ),
    "embedding": {
        "positions": Field(
            "learned", "how the order of positions enters the model", OneOf(POSITIONS)
        ),
        "max_length": Field(
            16,
            "number of learned positions, the longest input they allow",
            fields.integer(1, 2**24),
        ),
        "scale": Field(
            1.0,
            "factor of embeddings, before positions are added; not of tied logits",
            checks.positive_number,
        ),
        "segments": Field(
            0,
            "kinds of segments, each with an embedding; 0: none",
            fields.integer(0, 2**20),
        ),
        "norm": Field(
            False, "whether the sum of all embeddings is normalized", fields.boolean
        ),
        "rotary_period": Field(
            10_000.0,
            "largest period of rotary positions, over 2 pi",
            checks.positive_number,
        ),
        "frequencies": Field(
            None,
            "radians per position of rotary pairs, a list of key_size / 2, or a list "
            "of such lists for each layer; None: from rotary_period",
            fields.optional(_frequencies),
        ),
    },
    "attention": {
        "num_heads": Field(
            1, "query heads of each layer; 0: no attention part", _SIZE_OR_NONE
        ),
        "num_key_value_heads": Field(
            None,
            "key/value heads of each layer, a divisor of num_heads; None: num_heads",
            fields.optional(_SIZE),
            int,
        ),
        "key_size": Field(
            None,
            "query, key and value size of a head; None: model_size / num_heads",
            fields.optional(_SIZE),
            int,
        ),
        "score": Field(
            "dot_product",
            "how a query and a key give a score",
            OneOf(modules.CHOICES["score"]),
        ),
        "scale": Field(
            None,
            "factor of the dot products; None: 1 / sqrt(key_size)",
            fields.optional(checks.positive_number),
            float,
        ),
        "soft_cap": Field(
            None,
            "bounds scores s to soft_cap * tanh(s / soft_cap); None: no bound",
            fields.optional(checks.positive_number),
            float,
        ),
        "temperature": Field(
            1.0,
            "scores are divided by it, before biases of positions are added: below 1 "
            "attention is sharper",
            checks.positive_number,
        ),
        "offset": Field(
            0.0,
            "added to the dot products inside the sigmoid of score sigmoid; -log of "
            "the length makes rows sum to about 1 at first",
            checks.number,
        ),
        "normalizer": Field(
            "softmax",
            "whether weights are divided by their sum, or not (scores sigmoid and "
            "linear)",
            OneOf(modules.CHOICES["normalizer"]),
        ),
        "sinks": Field(
            None,
            "logit of a sink that each head may leave attention at, learned or a "
            "number; None: no sink",
            fields.optional(_sinks),
        ),
        "gate": Field(
            "none",
            "whether heads' outputs are multiplied by a sigmoid of the query's input, "
            "per head or per channel",
            OneOf(modules.CHOICES["gate"]),
        ),
        "window": Field(
            None,
            "how many positions to either side a query sees (a causal model or a "
            "decoder: before it); None: all; or a list of these, one for each layer; "
            "cross-attention sees all",
            _window,
        ),
        "with_bias": Field(
            True, "whether queries, keys and values have a bias", fields.boolean
        ),
        "output_bias": Field(
            True, "whether the output projection has a bias", fields.boolean
        ),
        "qk_norm": Field(
            False, "whether queries and keys are normalized", fields.boolean
        ),
        "qk_norm_over": Field(
            "head",
            "what qk_norm takes the mean square over: each head, or all of the layer",
            OneOf(QK_NORMS),
        ),
        "differential": Field(
            False,
            "whether heads are differences of two maps, of which num_heads has both",
            fields.boolean,
        ),
        "smear_keys": Field(
            False,
            "whether each key is mixed with the one before it, by a learned share",
            fields.boolean,
        ),
        "residual": Field(
            True, "whether attention adds its output to its input", fields.boolean
        ),
        "implementation": Field(
            "auto",
            "how attention is computed, auto by length and device",
            OneOf(attention.IMPLEMENTATIONS),
        ),
        "kept_heads": Field(
            None,
            "pruned models: a list of the heads left in each layer (encoder, decoder, "
            "cross-attention in turn); None: all",
            fields.optional(a_list),
        ),
    },
    "feed_forward": {
        "hidden_size": Field(
            64,
            "hidden units of the feed-forward part; 0: no such part",
            fields.integer(0, 2**22),
        ),
        "activation": Field(
            "gelu",
            "activation function of the hidden units (with a gate: those in -glu)",
            OneOf(ACTIVATIONS),
        ),
        "with_bias": Field(
            True, "whether both projections have a bias", fields.boolean
        ),
        "residual": Field(
            True, "whether this part adds its output to its input", fields.boolean
        ),
        "parallel": Field(
            False,
            "whether this part reads what attention reads, and both are added to it",
            fields.boolean,
        ),
        "hidden_sizes": Field(
            None,
            "pruned models: a list of the hidden units of each layer; None: all",
            fields.optional(a_list),
        ),
    },
    "norm": {
        "kind": Field("layer_norm", "how activations are normalized", OneOf(NORMS)),
        "epsilon": Field(
            1e-5,
            "added to the variance, so that no division is by 0",
            checks.positive_number,
        ),
        "position": Field(
            "pre",
            "where norms stand: before the parts of a layer (pre), after the sum "
            "(post), before and after a part (both), after a part (reordered)",
            OneOf(NORM_PLACES),
        ),
    },
    "output": {
        "pool": Field(
            None,
            "what the logits read: each position (None), the first one (first), or the "
            "mean of the valid ones (mean)",
            fields.optional(OneOf(POOLS)),
            str,
        ),
        "hidden": Field(
            None,
            "activation function of one more layer before the logits, of gelu, tanh "
            "and relu; None: no such layer",
            fields.optional(OneOf(OUTPUT_ACTIVATIONS)),
            str,
        ),
        "norm": Field(
            False, "whether what the logits read is normalized last", fields.boolean
        ),
        "logits": Field(
            True, "whether there are logits; a trained model needs them", fields.boolean
        ),
        "tied": Field(
            False,
            "whether logits are dot products with the embeddings of tokens",
            fields.boolean,
        ),
        "with_bias": Field(True, "whether the logits have a bias", fields.boolean),
        "soft_cap": Field(
            None,
            "bounds logits x to soft_cap * tanh(x / soft_cap); None: no bound",
            fields.optional(checks.positive_number),
            float,
        ),
    },
}


def make_norm(config: Any) -> Callable[..., Callable[[jax.Array], jax.Array]]:
    """Returns what makes the norms of a model from their `name`."""
    return functools.partial(NORMS[config.norm.kind], config.norm.epsilon)


def default_config() -> "ml_collections.ConfigDict":
    """Returns `config.model` with the default of every field."""
    return fields.defaults(FIELDS)
