"""The config of a model: its fields, and which heads its layers have.

H heads and G key/value heads before any were pruned, L layers.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from mha_haiku import attention, checks, fields, modules
from mha_haiku.fields import Field, OneOf

if TYPE_CHECKING:
    import ml_collections

# What names in a config stand for.
ACTIVATIONS = {
    "gelu": modules.gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
}
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
FAMILIES = ("encoder", "causal", "set_classifier")
SCORES = ("dot_product", "additive")


def _a_list(name: str, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise checks.ConfigError(f"{name} must be a list, got {value!r}.")
    return value


_SIZE = fields.integer(1, 2**20)
_SIZE_OR_NONE = fields.integer(0, 2**20)

FIELDS = {
    "family": Field("encoder", "what it answers, and from what", OneOf(FAMILIES)),
    "num_layers": Field(
        1, "each of attention and a feed-forward part", fields.integer(1, 10_000)
    ),
    "model_size": Field(32, "width of the residual stream", _SIZE),
    "dropout_rate": Field(0.0, "what dropout sets to 0, in [0, 1)", checks.fraction),
    "precision": Field("float32", "what it computes in", OneOf(PRECISIONS)),
    "rematerialize": Field(
        False,
        "whether layers are computed again for the gradient, to save memory",
        fields.boolean,
    ),
    "scan_layers": Field(
        False,
        "whether layers are one compiled loop: less to compile, parameters stacked",
        fields.boolean,
    ),
    "embedding": {
        "positions": Field(
            "learned",
            "how the model knows them",
            OneOf(POSITIONS),
            formerly="config.model.positions",
        ),
        "max_length": Field(
            16,
            "positions that learned ones can tell apart",
            fields.integer(1, 2**24),
            formerly="config.model.max_length",
        ),
    },
    "attention": {
        "num_heads": Field(
            1,
            "heads of queries, in each layer; 0: no attention part",
            _SIZE_OR_NONE,
            formerly="config.model.num_heads",
        ),
        "num_key_value_heads": Field(
            None,
            "divides num_heads; None: as many",
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
        "score": Field("dot_product", "of query and key", OneOf(SCORES)),
        "scale": Field(
            None,
            "what dot products are multiplied by; None: 1 / sqrt(key_size)",
            fields.optional(checks.positive_number),
            float,
        ),
        "soft_cap": Field(
            None,
            "scores s become soft_cap * tanh(s / soft_cap); None: they stay",
            fields.optional(checks.positive_number),
            float,
        ),
        "window": Field(
            None,
            "positions a query sees to either side, or back in a causal model; "
            "None: all",
            fields.optional(fields.integer(0, 2**31 - 1)),
            int,
        ),
        "with_bias": Field(
            True,
            "whether queries, keys and values have a bias",
            fields.boolean,
            formerly="config.model.with_bias",
        ),
        "output_bias": Field(
            True,
            "whether the output of all heads has a bias",
            fields.boolean,
            formerly="config.model.with_bias",
        ),
        "qk_norm": Field(
            False,
            "whether queries and keys are normalized",
            fields.boolean,
            formerly="config.model.qk_norm",
        ),
        "smear_keys": Field(
            False,
            "whether keys are mixed with those before them, by a learned share",
            fields.boolean,
            formerly="config.model.smear_keys",
        ),
        "residual": Field(
            True, "whether its output is added to its input", fields.boolean
        ),
        "implementation": Field(
            "auto", "how it is computed", OneOf(attention.IMPLEMENTATIONS)
        ),
        "kept_heads": Field(
            None,
            "of a pruned model: the heads that each layer kept, a list of lists",
            fields.optional(_a_list),
            formerly="config.model.kept_heads",
        ),
    },
    "feed_forward": {
        "hidden_size": Field(
            64,
            "width inside the feed-forward part; 0: none",
            fields.integer(0, 2**22),
            formerly="config.model.hidden_size",
        ),
        "activation": Field(
            "gelu",
            "of hidden units",
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
            True, "whether its output is added to its input", fields.boolean
        ),
        "hidden_sizes": Field(
            None,
            "of a pruned model: the hidden units of each layer, a list",
            fields.optional(_a_list),
            formerly="config.model.hidden_sizes",
        ),
    },
    "norm": {
        "kind": Field(
            "layer_norm",
            "which norm",
            OneOf(NORMS),
            formerly="config.model.norm",
        ),
        "epsilon": Field(
            1e-5,
            "added to the variance",
            checks.positive_number,
            formerly="config.model.norm_epsilon",
        ),
        "position": Field(
            "pre",
            "before or after the parts of a layer",
            OneOf(("pre", "post")),
            formerly="config.model.norm_position",
        ),
    },
    "output": {
        "with_bias": Field(True, "whether the logits have a bias", fields.boolean),
    },
}


class LayerHeads(NamedTuple):
    """The heads of a layer.

    Attributes:
      names: Which of the H heads of the unpruned layer they are, ascending.
      num_key_value_heads: How many key/value heads they read.
      groups: Which of these each head reads, or None where all serve equally many.
      key_value_names: Which of the G heads of the unpruned layer these are.
    """

    names: tuple[int, ...]
    num_key_value_heads: int
    groups: tuple[int, ...] | None
    key_value_names: tuple[int, ...]


def heads_of_layers(config: Any) -> tuple[LayerHeads, ...]:
    """Returns the heads of each of the L layers of the model that a config describes.

    Args:
      config: `config.model`.
    """
    kept = config.attention.kept_heads
    if kept is None:
        kept = [range(config.attention.num_heads)] * config.num_layers
    return tuple(_layer_heads(config.attention, sorted(names)) for names in kept)


def hidden_sizes(config: Any) -> tuple[int, ...]:
    """Returns the number of hidden units of each of the L layers.

    Args:
      config: `config.model`.
    """
    sizes = config.feed_forward.hidden_sizes
    if sizes is None:
        return (config.feed_forward.hidden_size,) * config.num_layers
    return tuple(sizes)


def key_size(config: Any) -> int:
    """Returns K, the size of a head's queries, keys and values.

    Args:
      config: `config.model`.
    """
    given = config.attention.key_size
    return given or config.model_size // max(1, config.attention.num_heads)


def default_config() -> "ml_collections.ConfigDict":
    """Returns `config.model` with the default of every field."""
    return fields.defaults(FIELDS)


@checks.user_mistakes()
def check(config: "ml_collections.ConfigDict") -> None:
    """Raises `checks.ConfigError` where a field of `config.model` is out of range."""
    fields.check("config.model", config.to_dict(), FIELDS)
    of_attention, model_size = config.attention, config.model_size
    num_heads, num_groups = of_attention.num_heads, of_attention.num_key_value_heads
    if not num_heads and not config.feed_forward.hidden_size:
        raise checks.ConfigError(
            "config.model.attention.num_heads or feed_forward.hidden_size must be "
            "above 0, got 0 for both."
        )
    if num_heads and of_attention.key_size is None and model_size % num_heads:
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
    if of_attention.score == "additive":
        for field in ("scale", "soft_cap"):
            if of_attention[field] is not None:
                raise checks.ConfigError(
                    f"config.model.attention.{field} is of dot products, and must be "
                    f"None with score = 'additive', got {of_attention[field]}."
                )
    kind, name = config.embedding.positions, "config.model.embedding.positions"
    if not num_heads and kind in ("rotary", "alibi", "t5"):
        raise checks.ConfigError(
            f"{name} = {kind!r} tells attention alone, of which there is none with "
            "attention.num_heads = 0; learned, sinusoidal and none serve without."
        )
    if kind == "rotary" and key_size(config) % 2:
        raise checks.ConfigError(
            f"{name} = 'rotary' needs an even key size, got {key_size(config)}."
        )
    if kind == "sinusoidal" and model_size % 2:
        raise checks.ConfigError(
            f"{name} = 'sinusoidal' needs an even model_size, got {model_size}."
        )
    _check_pruned(config)


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


def _check_pruned(config) -> None:
    """Checks the fields that a pruned model has in place of one number for all."""
    kept, sizes = config.attention.kept_heads, config.feed_forward.hidden_sizes
    for field, given in (
        ("attention.kept_heads", kept),
        ("feed_forward.hidden_sizes", sizes),
    ):
        if given is None:
            continue
        if len(given) != config.num_layers:
            raise checks.ConfigError(
                f"config.model.{field} must have an entry for each of the "
                f"{config.num_layers} layers, got {given!r}."
            )
        if config.scan_layers:
            raise checks.ConfigError(
                f"config.model.scan_layers must be False with {field}: scanned layers "
                "are alike."
            )
    for i, heads in enumerate(kept or ()):
        name = f"config.model.attention.kept_heads[{i}]"
        for head in _a_list(name, heads):
            checks.integer_in(name, head, 0, config.attention.num_heads - 1)
        if len(set(heads)) != len(heads):
            raise checks.ConfigError(f"{name} must not repeat a head, got {heads!r}.")
    for i, size in enumerate(sizes or ()):
        fields.integer(1, 2**22)(f"config.model.feed_forward.hidden_sizes[{i}]", size)


def _nearest_divisor(number, wanted):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
