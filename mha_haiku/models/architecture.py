"""The config of a model: its fields, and which heads its layers have.

L layers; H heads and G key/value heads of an unpruned layer. The heads of a model
stand in one list of its P attention parts: each layer of an encoder has one, and in an
encoder-decoder those of the encoder come first, then the self-attention of each layer
of the decoder, then the cross-attention of each. All that is said "per layer" of heads
(`kept_heads`, gates, importance, attention maps) follows this list. What is said per
layer of other things (hidden units, windows) follows the layers: those of the encoder,
then those of the decoder.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_haiku import attention, checks, fields, modules
from mha_haiku.fields import Field, OneOf
from mha_haiku.modules import anatomy

if TYPE_CHECKING:
    import ml_collections


class Activation(NamedTuple):
    """What hidden units go through.

    Attributes:
      activation: Applied to the hidden units, or to the gate.
      gated: Whether the hidden units are multiplied by a gate, a linear map of its own.
    """

    activation: Callable[[jax.Array], jax.Array]
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
POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
PRECISIONS = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
}
FAMILIES = ("encoder", "causal", "set_classifier", "encoder_decoder")
KINDS = ("encoder", "decoder", "cross")  # of attention, in an encoder-decoder
SCORES = ("dot_product", "additive", "sigmoid", "linear")
NORMALIZERS = ("softmax", "none")
GATES = {
    "none": None,
    "head": modules.head_gates,
    "channel": modules.channel_gates,
}
NORM_POSITIONS = ("pre", "post", "both")
POOLS = ("first", "mean")


def _a_list(name: str, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise checks.ConfigError(f"{name} must be a list, got {value!r}.")
    return value


def _window(name: str, value: Any) -> Any:
    check = fields.optional(fields.integer(0, 2**31 - 1))
    if not _is_list(value):
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
    by_layer = any(map(_is_list, _a_list(name, value)))
    for i, row in enumerate(value if by_layer else [value]):
        own = f"{name}[{i}]" if by_layer else name
        for j, each in enumerate(_a_list(own, row)):
            checks.non_negative_number(f"{own}[{j}]", each)
    return value


def _is_list(value: Any) -> bool:
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
            "learned",
            "how the order of positions enters the model",
            OneOf(POSITIONS),
            formerly="config.model.positions",
        ),
        "max_length": Field(
            16,
            "number of learned positions, the longest input they allow",
            fields.integer(1, 2**24),
            formerly="config.model.max_length",
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
            1,
            "query heads of each layer; 0: no attention part",
            _SIZE_OR_NONE,
            formerly="config.model.num_heads",
        ),
        "num_key_value_heads": Field(
            None,
            "key/value heads of each layer, a divisor of num_heads; None: num_heads",
            fields.optional(_SIZE),
            int,
            formerly="config.model.num_key_value_heads",
        ),
        "key_size": Field(
            None,
            "query, key and value size of a head; None: model_size / num_heads",
            fields.optional(_SIZE),
            int,
            formerly="config.model.key_size",
        ),
        "score": Field(
            "dot_product", "how a query and a key give a score", OneOf(SCORES)
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
            OneOf(NORMALIZERS),
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
            OneOf(GATES),
        ),
        "window": Field(
            None,
            "how many positions to either side a query sees (a causal model or a "
            "decoder: before it); None: all; or a list of these, one for each layer; "
            "cross-attention sees all",
            _window,
        ),
        "with_bias": Field(
            True,
            "whether queries, keys and values have a bias",
            fields.boolean,
            formerly="config.model.with_bias",
        ),
        "output_bias": Field(
            True,
            "whether the output projection has a bias",
            fields.boolean,
            formerly="config.model.with_bias",
        ),
        "qk_norm": Field(
            False,
            "whether queries and keys are normalized, per head",
            fields.boolean,
            formerly="config.model.qk_norm",
        ),
        "smear_keys": Field(
            False,
            "whether each key is mixed with the one before it, by a learned share",
            fields.boolean,
            formerly="config.model.smear_keys",
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
            fields.optional(_a_list),
            formerly="config.model.kept_heads",
        ),
    },
    "feed_forward": {
        "hidden_size": Field(
            64,
            "hidden units of the feed-forward part; 0: no such part",
            fields.integer(0, 2**22),
            formerly="config.model.hidden_size",
        ),
        "activation": Field(
            "gelu",
            "activation function of the hidden units (with a gate: those in -glu)",
            OneOf(ACTIVATIONS),
            formerly="config.model.activation",
        ),
        "with_bias": Field(
            True,
            "whether both projections have a bias",
            fields.boolean,
            formerly="config.model.with_bias",
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
            fields.optional(_a_list),
            formerly="config.model.hidden_sizes",
        ),
    },
    "norm": {
        "kind": Field(
            "layer_norm",
            "how activations are normalized",
            OneOf(NORMS),
            formerly="config.model.norm",
        ),
        "epsilon": Field(
            1e-5,
            "added to the variance, so that no division is by 0",
            checks.positive_number,
            formerly="config.model.norm_epsilon",
        ),
        "position": Field(
            "pre",
            "whether norms come before or after the parts of a layer",
            OneOf(NORM_POSITIONS),
            formerly="config.model.norm_position",
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


class LayerHeads(NamedTuple):
    """The heads of a layer.

    Attributes:
      names: The indices of the heads in the unpruned layer, ascending.
      num_key_value_heads: How many key/value heads they read.
      groups: For each head the key/value head that it reads; None where each
        key/value head serves the same number of heads, in order.
      key_value_names: The indices of the key/value heads in the unpruned layer.
      kind: One of `KINDS`; "" in models that have one kind only.
      layer: Which layer of its kind.
    """

    names: tuple[int, ...]
    num_key_value_heads: int
    groups: tuple[int, ...] | None
    key_value_names: tuple[int, ...]
    kind: str = ""
    layer: int = 0

    @property
    def label(self) -> str:
        """What it is called: "layer 3", or "cross 3" where there are kinds."""
        return f"{self.kind or 'layer'} {self.layer}"

    @property
    def address(self) -> str:
        """How a user names it in a flag: "3", or "cross.3" where there are kinds."""
        return f"{self.kind}.{self.layer}" if self.kind else f"{self.layer}"


def heads_of_layers(config: Any) -> tuple[LayerHeads, ...]:
    """Returns the heads of each of the P attention parts that a config describes.

    They are those of L layers where the model has one kind of them.

    Args:
      config: `config.model`.
    """
    kept, places = config.attention.kept_heads, _places(config)
    if kept is None:
        kept = [range(config.attention.num_heads)] * len(places)
    return tuple(
        _layer_heads(config.attention, sorted(names))._replace(kind=kind, layer=layer)
        for names, (kind, layer) in zip(kept, places, strict=True)
    )


def find_part(config: Any, address: str) -> int:
    """Returns the index of an attention part, of 0 to P - 1.

    Args:
      config: `config.model`.
      address: As `LayerHeads.address` says it.

    Raises:
      ConfigError: If there is none.
    """
    addresses = [each.address for each in heads_of_layers(config)]
    if address.strip() in addresses:
        return addresses.index(address.strip())
    listed = f"{addresses[0]} to {addresses[-1]}"
    if config.family == "encoder_decoder":
        listed = ", ".join(addresses[:24]) + ", ..." * (len(addresses) > 24)
    raise checks.ConfigError(
        f"a layer must be one of {listed}, got {address!r}."
        f"{checks.nearest(address, addresses)}"
    )


def part_of(config: Any, module: str) -> int | slice | None:
    """Returns which attention part a module, by its name, is in.

    Args:
      config: `config.model`.
      module: As it stands among the parameters.

    Returns:
      Its index; of scanned layers, whose arrays are of all of a kind, the slice of
      these; None: it is in no layer.
    """
    layer = anatomy.layer_of(module)
    if layer is None:
        return None
    kind = 0
    if layer.scope.startswith("decoder"):
        kind = 2 if layer.part.startswith("/cross_attention") else 1
    decoder = num_decoder_layers(config)
    return _among(layer, (config.num_layers, decoder, decoder), kind)


def layer_of(config: Any, module: str) -> int | slice | None:
    """Returns which of all layers a module, by its name, is in; as `part_of` does.

    Args:
      config: `config.model`.
      module: As it stands among the parameters.
    """
    layer = anatomy.layer_of(module)
    if layer is None:
        return None
    stack = int(layer.scope.startswith("decoder"))
    return _among(layer, (config.num_layers, num_decoder_layers(config)), stack)


def _among(layer, sizes, place) -> int | slice:
    """Returns where a layer stands in a list of several stacks of these sizes."""
    before = sum(sizes[:place])
    if layer.index is None:
        return slice(before, before + sizes[place])
    return before + layer.index


def num_decoder_layers(config: Any) -> int:
    """Returns the number of layers of the decoder; 0: there is none.

    Args:
      config: `config.model`.
    """
    if config.family != "encoder_decoder":
        return 0
    return config.decoder.num_layers or config.num_layers


def num_all_layers(config: Any) -> int:
    """Returns the number of layers of encoder and decoder together.

    Args:
      config: `config.model`.
    """
    return config.num_layers + num_decoder_layers(config)


def _places(config) -> list[tuple[str, int]]:
    """Returns the kind and the layer of each attention part, in their order."""
    own = range(config.num_layers)
    decoder = range(num_decoder_layers(config))
    if not decoder:
        return [("", i) for i in own]
    layers = zip(KINDS, (own, decoder, decoder), strict=True)
    return [(kind, i) for kind, indices in layers for i in indices]


def description(config: Any) -> str:
    """Returns what a model is, in a few words.

    Args:
      config: `config.model`.
    """
    counts = [len(layer.names) for layer in heads_of_layers(config)]
    heads = f"{counts[0]}" if len(set(counts)) == 1 else "/".join(map(str, counts[:16]))
    number, decoder = f"{config.num_layers}", num_decoder_layers(config)
    if decoder:
        number += f" + {decoder}"
    return (
        f"{config.family}: {number} layer{'s' * (number != '1')} "
        f"of {heads} heads{', ...' * (len(counts) > 16)}, model size "
        f"{config.model_size}, {config.embedding.positions} positions"
    )


def hidden_sizes(config: Any) -> tuple[int, ...]:
    """Returns the number of hidden units of each of the L layers.

    Args:
      config: `config.model`.
    """
    sizes = config.feed_forward.hidden_sizes
    if sizes is None:
        return (config.feed_forward.hidden_size,) * num_all_layers(config)
    return tuple(sizes)


def windows(config: Any) -> tuple[int | None, ...]:
    """Returns the window of each of the L layers, None for one that sees everything.

    Args:
      config: `config.model`.
    """
    given = config.attention.window
    return tuple(given) if _is_list(given) else (given,) * num_all_layers(config)


def frequencies(config: Any) -> tuple[tuple[float, ...] | None, ...]:
    """Returns the rotary frequencies `[K / 2]` of each of the L layers.

    None stands for those of `embedding.rotary_period`.

    Args:
      config: `config.model`.
    """
    given = config.embedding.frequencies
    if given is None:
        return (None,) * num_all_layers(config)
    if not any(_is_list(each) for each in given):
        given = [given] * num_all_layers(config)
    return tuple(map(tuple, given))


def are_alike(config: Any) -> bool:
    """Returns whether layers differ in the values of their parameters alone.

    Args:
      config: `config.model`.
    """
    is_pruned = config.attention.kept_heads is not None
    is_pruned |= config.feed_forward.hidden_sizes is not None
    differ = max(len(set(each(config))) for each in (windows, frequencies)) > 1
    return not is_pruned and not differ


def key_size(config: Any) -> int:
    """Returns K, the size of a head's queries, keys and values.

    Args:
      config: `config.model`.
    """
    given = config.attention.key_size
    return given or config.model_size // max(1, config.attention.num_heads)


def make_norm(config: Any) -> Callable[..., Callable[[jax.Array], jax.Array]]:
    """Returns what makes the norms of a model from their `name`.

    Args:
      config: `config.model`.
    """
    return functools.partial(NORMS[config.norm.kind], config.norm.epsilon)


def default_config() -> "ml_collections.ConfigDict":
    """Returns `config.model` with the default of every field."""
    return fields.defaults(FIELDS)


@checks.user_mistakes()
def check(config: "ml_collections.ConfigDict") -> None:
    """Raises `checks.ConfigError` where a field of `config.model` is out of range."""
    fields.check("config.model", config.to_dict(), FIELDS)
    section, model_size = config.attention, config.model_size
    num_heads, num_groups = section.num_heads, section.num_key_value_heads
    if not num_heads and not config.feed_forward.hidden_size:
        raise checks.ConfigError(
            "config.model.attention.num_heads or feed_forward.hidden_size must be "
            "above 0, got 0 for both."
        )
    if num_heads and section.key_size is None and model_size % num_heads:
        raise checks.ConfigError(
            f"config.model.attention.num_heads must divide model_size = {model_size} "
            f"where key_size is not given, got {num_heads}; the nearest that does is "
            f"{_nearest_divisor(model_size, num_heads)}."
        )
    if num_groups and num_heads % num_groups:
        raise checks.ConfigError(
            "config.model.attention.num_key_value_heads must divide num_heads = "
            f"{num_heads}, got {num_groups}; the nearest that does is "
            f"{_nearest_divisor(num_heads, num_groups)}."
        )
    _check_score(section)
    kind, name = config.embedding.positions, "config.model.embedding.positions"
    if not num_heads and kind in ("rotary", "alibi", "t5"):
        raise checks.ConfigError(
            f"{name} = {kind!r} works through attention, of which there is none with "
            "attention.num_heads = 0; choose learned, sinusoidal or none."
        )
    if kind == "rotary" and key_size(config) % 2:
        raise checks.ConfigError(
            f"{name} = 'rotary' needs an even key size, got {key_size(config)}."
        )
    if kind == "sinusoidal" and model_size % 2:
        raise checks.ConfigError(
            f"{name} = 'sinusoidal' needs an even model_size, got {model_size}."
        )
    _check_by_layer(config)
    _check_rotary(config)
    _check_parts(config)
    _check_output(config)
    _check_decoder(config)


def _check_score(section) -> None:
    """Checks what goes with the score, of `config.model.attention`."""
    score, name = section.score, "config.model.attention"
    for field, default, known_by in (
        ("scale", None, ("dot_product", "sigmoid")),
        ("soft_cap", None, ("dot_product",)),
        ("offset", 0, ("sigmoid",)),
        ("temperature", 1, ("dot_product", "additive", "sigmoid")),
    ):
        if score not in known_by and section[field] != default:
            raise checks.ConfigError(
                f"{name}.{field} is only for score = {' or '.join(known_by)}, and must "
                f"be {default} with score = {score!r}, got {section[field]}."
            )
    if section.normalizer == "none":
        if score not in ("sigmoid", "linear"):
            raise checks.ConfigError(
                f"{name}.normalizer = 'none' needs score = sigmoid or linear, whose "
                f"exponentials stay small, got {score!r}."
            )
        if section.sinks is not None:
            raise checks.ConfigError(
                f"{name}.sinks must be None with normalizer = 'none': without a "
                f"denominator there is none to add to, got {section.sinks!r}."
            )


def _layer_heads(config, names) -> LayerHeads:
    num_groups = config.num_key_value_heads or config.num_heads
    group_of = [name * num_groups // config.num_heads for name in names]
    key_value_names = sorted(set(group_of))
    groups = tuple(key_value_names.index(group) for group in group_of)
    is_even = len({groups.count(group) for group in groups}) < 2
    return LayerHeads(
        tuple(names),
        len(key_value_names),
        None if is_even else groups,
        tuple(key_value_names),
    )


def _check_by_layer(config) -> None:
    """Checks the fields that may have a value per layer."""
    kept, sizes = config.attention.kept_heads, config.feed_forward.hidden_sizes
    window, turns = config.attention.window, config.embedding.frequencies
    for field, given, is_alike in (
        ("attention.kept_heads", kept, False),
        ("feed_forward.hidden_sizes", sizes, False),
        ("attention.window", window, len(set(windows(config))) == 1),
        ("embedding.frequencies", turns, len(set(frequencies(config))) == 1),
    ):
        if not _is_list(given) or (given is turns and not any(map(_is_list, given))):
            continue
        count, of = num_all_layers(config), "layers"
        if given is kept:
            count, of = len(_places(config)), "layers"
            if config.family == "encoder_decoder":
                of = "attention parts (encoder, decoder, cross)"
        if len(given) != count:
            raise checks.ConfigError(
                f"config.model.{field} must have an entry for each of the {count} {of},"
                f" got {len(given)}."
            )
        if config.scan_layers and not is_alike:
            raise checks.ConfigError(
                f"config.model.scan_layers must be False with {field}: scanned layers "
                "must be alike in all but the values of their parameters."
            )
    for i, heads in enumerate(kept or ()):
        name = f"config.model.attention.kept_heads[{i}]"
        for head in _a_list(name, heads):
            checks.integer_in(name, head, 0, config.attention.num_heads - 1)
        if len(set(heads)) != len(heads):
            raise checks.ConfigError(f"{name} must not repeat a head, got {heads!r}.")
    for i, size in enumerate(sizes or ()):
        fields.integer(1, 2**22)(f"config.model.feed_forward.hidden_sizes[{i}]", size)


def _check_rotary(config) -> None:
    """Checks the frequencies of rotary positions."""
    name, kind = "config.model.embedding.frequencies", config.embedding.positions
    if config.embedding.frequencies is None:
        return
    if kind != "rotary":
        raise checks.ConfigError(
            f"{name} is only for rotary positions, and must be None with positions = "
            f"{kind!r}."
        )
    for i, each in enumerate(frequencies(config)):
        if len(each) != key_size(config) // 2:
            raise checks.ConfigError(
                f"{name} must have a number for each of the key_size / 2 = "
                f"{key_size(config) // 2} pairs of features, got {len(each)} for layer "
                f"{i}."
            )


def _check_parts(config) -> None:
    """Checks how the parts of a layer are added, and whether norms are any."""
    has_residuals = config.attention.residual and config.feed_forward.residual
    if config.feed_forward.parallel and not has_residuals:
        raise checks.ConfigError(
            "config.model.feed_forward.parallel needs attention.residual = True and "
            "feed_forward.residual = True: both parts are added to what they read."
        )
    if config.feed_forward.parallel and config.norm.position == "post":
        raise checks.ConfigError(
            "config.model.feed_forward.parallel needs norm.position = pre or both, "
            "got 'post'."
        )
    for section in ("embedding", "output"):
        if config[section].norm and config.norm.kind == "none":
            raise checks.ConfigError(
                f"config.model.{section}.norm must be False with norm.kind = 'none'."
            )


def _check_output(config) -> None:
    """Checks what stands between the last layer and the logits."""
    output, name = config.output, "config.model.output"
    is_set = config.family == "set_classifier"
    for field in ("pool", "tied"):
        if is_set and output[field]:
            raise checks.ConfigError(
                f"{name}.{field} must be {FIELDS['output'][field].default} for a "
                "set_classifier, which has a logit for each element."
            )
    if is_set and not output.logits:
        raise checks.ConfigError(f"{name}.logits must be True for a set_classifier.")
    for field in ("hidden", "norm", "tied", "soft_cap"):
        if not output.logits and output[field]:
            raise checks.ConfigError(
                f"{name}.{field} must be {FIELDS['output'][field].default} with logits "
                f"= False: it is part of the logits, got {output[field]!r}."
            )


def _check_decoder(config) -> None:
    """Checks what only a model with a decoder may have, or may not."""
    if config.family != "encoder_decoder":
        if config.decoder.num_layers is not None:
            raise checks.ConfigError(
                "config.model.decoder.num_layers must be None for a model without a "
                f"decoder: family is {config.family!r}."
            )
        return
    for name, value, wanted in (
        ("attention.num_heads", config.attention.num_heads, "at least 1"),
        ("feed_forward.parallel", not config.feed_forward.parallel, "False"),
        ("output.pool", config.output.pool is None, "None"),
        ("output.logits", config.output.logits, "True"),
    ):
        if not value:
            raise checks.ConfigError(
                f"config.model.{name} must be {wanted} for an encoder_decoder."
            )


def _nearest_divisor(number, wanted):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
