"""Fields of `config.json` that several families share, and how they are read.

Files of `transformers` 4 and 5 have different keys with the same meaning: rotary
positions are in `rope_theta` and `rope_scaling`, or in `rope_parameters`; windows in a
pattern, or in `layer_types`. Both are read.

L layers, D width, H heads, F hidden units, K size of a head.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mha_haiku.core import checks, fields, positions
from mha_haiku.interop.families import name_tables
from mha_haiku.interop.families.name_tables import Rule, Setting

Theirs = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_python": "geglu",
}
HIDDEN = {"gelu": "gelu", "relu": "relu", "tanh": "tanh"}  # of the layer before logits

NO_LOGITS = {"output.logits": False}

# Options that would change numbers, and the values that are supported.
SUPPORTED = {
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "per_layer_config": (None, {}),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "use_bidirectional_attention": (None, False),
}
# The same for causal models, which `transformers` makes bidirectional by any other
# value of `is_causal`.
SUPPORTED_CAUSAL = {
    **{name: values for name, values in SUPPORTED.items() if name != "is_decoder"},
    "is_causal": (True,),
}

_LENGTH = fields.integer(1, 2**31 - 1)


def at_least_one(name: str, value: Any) -> float:
    """Checks that `value` is a finite number of at least 1, and returns it."""
    if checks.number(name, value) < 1:
        raise ValueError(f"{name} must be a number of at least 1, got {value!r}.")
    return value


# Kinds of rotary positions, and the keys that they read next to their base and share.
_ROTARY_KINDS = {
    "default": {},
    "linear": {"factor": at_least_one},
    "llama3": {
        "factor": at_least_one,
        "low_freq_factor": checks.positive_number,
        "high_freq_factor": checks.positive_number,
        "original_max_position_embeddings": _LENGTH,
    },
}
_ROTARY_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    *_ROTARY_KINDS["llama3"],
    # Keys that other kinds read, and keys that nothing reads.
    *("attention_factor", "beta_fast", "beta_slow", "finetuned", "long_factor"),
    *("mrope_section", "mscale", "mscale_all_dim", "short_factor", "truncate"),
)
_WINDOW_KINDS = ("sliding_attention", "full_attention")
# Keys of the bases of rotary positions, by kinds of layers.
_THETAS = {
    "full_attention": "rope_theta",
    "sliding_attention": "rope_local_base_freq",
}


def _object(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {checks.shown(value)}.")
    return value


def _window_kinds(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {checks.shown(value)}.")
    return [checks.choice(name, kind, _WINDOW_KINDS) for kind in value]


# Classes other than tokens.
LABELS = Rule(
    # Their number counts where both are there.
    lambda theirs: {
        "num_classes": theirs["num_labels"] or len(theirs["id2label"] or (0, 1))
    },
    {
        "id2label": name_tables.key(None, _object, dict | None),
        "num_labels": name_tables.key(None, _LENGTH, int | None),
    },
)


# Our fields of L, D, H and F, and their usual names in a `config.json`.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "model_size": "hidden_size",
    "attention.num_heads": "num_attention_heads",
    "feed_forward.hidden_size": "intermediate_size",
}


def sizes(
    *defaults: int, names: Iterable[str] = _SIZES.values()
) -> tuple[Setting, ...]:
    """Makes the settings of L, D, H and F; without defaults all are required."""
    # The width is divided by the number of heads.
    checked = {"attention.num_heads": fields.integer(1, 2**20)}
    return tuple(
        Setting(ours, name, default, check=checked.get(ours))
        for ours, name, default in zip(
            _SIZES, names, defaults or [None] * 4, strict=False
        )
    )


def activation(
    theirs: str, default: str, names: Mapping[str, str] = ACTIVATIONS
) -> Setting:
    """Makes the setting of the feed-forward parts' activation."""
    return Setting("feed_forward.activation", theirs, default, names)


def next_token(
    name: str, logits: str, embeddings: str, *settings: Setting | Rule, tied: bool
) -> name_tables.OutputHead:
    """Makes the head of a causal model, from names of arrays; `tied` is a default."""
    return name_tables.OutputHead(
        name,
        {"output.with_bias": False},
        (name_tables.row("logits/w", logits, name_tables.transposed),),
        copies={logits: embeddings},
        settings=(Setting("output.tied", "tie_word_embeddings", tied), *settings),
    )


# A table of positions whose first rows are unused.
POSITIONS_AFTER_PADDING = Rule(
    lambda theirs: {
        "embedding.max_length": theirs["max_position_embeddings"]
        - theirs["pad_token_id"]
        - 1
    },
    {
        "max_position_embeddings": name_tables.key(512, fields.integer(1, 2**24)),
        "pad_token_id": name_tables.key(1, fields.integer(-1, 2**16)),
    },
)


def biases(default: bool) -> Rule:
    """Makes the rule of `attention_bias`: of queries, keys, values and the output."""
    ours_of = ("attention.with_bias", "attention.output_bias")

    return Rule(
        lambda theirs: dict.fromkeys(ours_of, theirs["attention_bias"]),
        {"attention_bias": name_tables.key(default, kind=bool)},
    )


def windows(
    is_local: Callable[[Theirs, int], bool],
    *,
    optional: bool = False,
    **keys: fields.Field,
) -> Rule:
    """Makes the rule of the positions that each layer's queries see.

    `is_local` says whether a layer has a window where `layer_types` does not, by
    `keys`. With `optional` it counts only with `use_sliding_window`: Qwen's configs
    have a window that most models do not use.
    """

    def read(theirs: Theirs) -> dict[str, Any]:
        window = theirs["sliding_window"]
        if optional and not theirs["use_sliding_window"]:
            window = None
        if window is None:
            return {"attention.window": None}
        # Theirs counts the query itself, ours the positions before it.
        sizes = [
            window - 1 if kind == "sliding_attention" else None
            for kind in _kinds_of_layers(theirs, is_local)
        ]
        is_one = all(size == sizes[0] for size in sizes)
        return {"attention.window": sizes[0] if is_one else sizes}

    keys |= {
        "sliding_window": name_tables.key(4096, _LENGTH, int | None),
        "layer_types": name_tables.key(None, _window_kinds, list | None),
    }
    if optional:
        keys["use_sliding_window"] = name_tables.key(False, kind=bool)
    return Rule(read, keys)


def _kinds_of_layers(
    theirs: Theirs, is_local: Callable[[Theirs, int], bool]
) -> list[str]:
    num_layers, kinds = theirs["num_hidden_layers"], theirs["layer_types"]
    if kinds is None:
        return [_WINDOW_KINDS[not is_local(theirs, i)] for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise checks.ConfigError(
            "config.json's layer_types must have an entry for each of "
            f"num_hidden_layers = {num_layers} layers, got {len(kinds)}."
        )
    return kinds


def one_window() -> Rule:
    """Makes the rule of Mistral: one window for all layers, or none."""
    rule = windows(lambda theirs, i: True)

    def read(theirs: Theirs) -> dict[str, Any]:
        kind = _WINDOW_KINDS[theirs["sliding_window"] is None]
        if set(theirs["layer_types"] or [kind]) != {kind}:
            raise checks.ConfigError(
                f"config.json's layer_types must be {kind!r} for all layers, as "
                "sliding_window says: transformers reads only that here."
            )
        return rule.read(theirs)

    return Rule(read, rule.keys)


def rotary(theta: str = "rope_theta", share: str = "", turning: float = 1.0) -> Rule:
    """Makes the rule of rotary positions of one kind.

    Args:
      theta: The key of their base outside of `rope_parameters`.
      share: The key of the share of a head's features that rotate, `turning` if it is
        left out. "" if all rotate, and `transformers` reads no share unless frequencies
        are scaled.
    """
    outside = share or "partial_rotary_factor"

    def read(theirs: Theirs) -> dict[str, Any]:
        # The older name counts where both are there, and the length outside.
        name = "rope_scaling" if theirs["rope_scaling"] else "rope_parameters"
        given = dict(theirs[name] or {})
        if length := theirs["original_max_position_embeddings"]:
            given["original_max_position_embeddings"] = length
        rope = _rope(name, given, theirs, theirs[theta], theirs[outside], bool(share))
        return _frequencies_field([rope], head_size(theirs))

    return Rule(read, _rotary_keys(theta, 10_000.0, outside, turning))


def rotary_by_layer(is_local: Callable[[Theirs, int], bool]) -> Rule:
    """Makes the rule of Gemma 3: layers with a window, as in `windows`, differ."""

    def read(theirs: Theirs) -> dict[str, Any]:
        rope = theirs["rope_parameters"] or {}
        for name in rope:
            checks.choice("a key of config.json's rope_parameters", name, _WINDOW_KINDS)
        ropes = {}
        for kind, theta in _THETAS.items():
            name = f"rope_parameters.{kind}"
            said = rope.get(kind)
            said = {"rope_type": "default"} if said is None else _object(name, said)
            if kind == "full_attention":
                said = {**said, **(theirs["rope_scaling"] or {})}
            share = theirs["partial_rotary_factor"]
            ropes[kind] = _rope(name, said, theirs, theirs[theta], share, False)
        kinds = _kinds_of_layers(theirs, is_local)
        return _frequencies_field([ropes[kind] for kind in kinds], head_size(theirs))

    keys = _rotary_keys("rope_theta", 1e6, "partial_rotary_factor", 1.0)
    return Rule(
        checks.user_mistakes()(read),
        {**keys, "rope_local_base_freq": name_tables.key(1e4, at_least_one)},
    )


def head_size(theirs: Theirs) -> int:
    """Returns K, the size of a head, from a `config.json`."""
    default = theirs["hidden_size"] // theirs["num_attention_heads"]
    return theirs["head_dim"] or default


def _rotary_keys(theta: str, base: float, share: str, turning: float) -> dict:
    return {
        "rope_parameters": name_tables.key(None, _object, dict | None),
        "rope_scaling": name_tables.key(None, _object, dict | None),
        theta: name_tables.key(base, at_least_one),
        share: name_tables.key(turning, checks.share),
        "original_max_position_embeddings": name_tables.key(None, _LENGTH, int | None),
        "head_dim": name_tables.key(None, fields.integer(1, 2**20), int | None),
    }


@checks.user_mistakes()
def _rope(
    name: str, given: Theirs, theirs: Theirs, theta: float, share: float, reads: bool
) -> dict[str, Any]:
    """Describes rotary positions by the keys of `transformers` 5.

    They are `given` at the file's key `name`, or else at others: the base `theta` and
    the `share` of rotating features, which not every family `reads`.
    """
    name = f"config.json's {name}"
    for each in given:
        checks.choice(f"a key of {name}", each, _ROTARY_KEYS)
    outside = {
        "rope_type": given.get("type", "default"),
        "rope_theta": theta,
        "partial_rotary_factor": share,
        "original_max_position_embeddings": theirs["max_position_embeddings"],
    }
    said = {**outside, **given}
    kind = said["rope_type"]
    label = "config.json's kind of rotary positions (rope_type)"
    checks.choice(label, kind, _ROTARY_KINDS)
    wanted = {"rope_theta": at_least_one, "partial_rotary_factor": checks.share}
    wanted |= _ROTARY_KINDS[kind]
    rope = {
        each: check(f"{name}.{each}", said.get(each)) for each, check in wanted.items()
    }
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ValueError(
            f"{name}.high_freq_factor must be above low_freq_factor = "
            f"{rope['low_freq_factor']!r}, got {rope['high_freq_factor']!r}."
        )
    if kind == "default" and not reads:
        rope["partial_rotary_factor"] = 1.0
    if rope["partial_rotary_factor"] != 1 and not reads:
        raise ValueError(
            f"{name}.partial_rotary_factor must be 1 for models that rotate all "
            f"features of a head, got {rope['partial_rotary_factor']!r}."
        )
    return {"rope_type": kind, **rope}


def _frequencies_field(ropes: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Makes the fields of rotary positions of one kind, or of one per layer."""
    first = ropes[0]
    if any(rope != first for rope in ropes):
        frequencies = [_frequencies(rope, size) for rope in ropes]
    elif first["rope_type"] == "default" and first["partial_rotary_factor"] == 1:
        frequencies = None
    else:
        frequencies = _frequencies(first, size)
    # Unused next to frequencies, but says where they come from.
    period = max(float(rope["rope_theta"]) for rope in ropes)
    return {"embedding.rotary_period": period, "embedding.frequencies": frequencies}


def _frequencies(rope: Theirs, size: int) -> list[float]:
    """Computes radians per position, `[K/2]`; features that do not rotate have 0.

    Source: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.2, and
    Chen et al. 2023, https://arxiv.org/abs/2306.15595 (linear).
    """
    turns = int(size * rope["partial_rotary_factor"])
    if turns % 2:
        raise checks.ConfigError(
            f"config.json's partial_rotary_factor = {rope['partial_rotary_factor']!r} "
            f"rotates {turns} of the {size} features of a head, but must rotate pairs."
        )
    result = positions.frequencies_of(turns, float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        result = result / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        rounds = rope["original_max_position_embeddings"] * result / (2 * np.pi)
        smooth = np.clip((rounds - low) / (high - low), 0, 1)
        result = (1 - smooth) * result / rope["factor"] + smooth * result
    return [*result.tolist(), *[0.0] * ((size - turns) // 2)]
