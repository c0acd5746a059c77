"""Fields of `config.json` that several families share, and how they are read.

Files of `transformers` 4 and 5 have different keys with the same meaning: rotary
positions are in `rope_theta` and `rope_scaling`, or in `rope_parameters`. Both are
read.

L layers, D width, H heads, F hidden units, K size of a head.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_haiku.core import checks, fields, positions
from mha_haiku.interop.families import name_tables
from mha_haiku.interop.families.name_tables import Rule, setting

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

LENGTH = fields.integer(1, 2**31 - 1)


def at_least_one(name: str, value: Any) -> float:
    """Checks that `value` is a finite number of at least 1, and returns it."""
    if checks.number(name, value) < 1:
        raise ValueError(f"{name} must be a number of at least 1, got {value!r}.")
    return value


def _object(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {checks.shown(value)}.")
    return value


# Classes other than tokens.
LABELS = Rule(
    # Their number counts where both are there.
    lambda theirs: {
        "num_classes": theirs["num_labels"] or len(theirs["id2label"] or (0, 1))
    },
    {
        "id2label": name_tables.key(None, _object, dict | None),
        "num_labels": name_tables.key(None, LENGTH, int | None),
    },
)


def sizes(*names: str) -> tuple[Rule, ...]:
    """Makes the rules of the vocabulary, L, D, H and F, without defaults."""
    ours = ("num_tokens", "num_layers", "model_size", "attention.num_heads")
    return tuple(map(setting, (*ours, "feed_forward.hidden_size"), names))


SIZES = sizes(
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
)


def activation(
    theirs: str, default: str, names: Mapping[str, str] = ACTIVATIONS
) -> Rule:
    """Makes the rule of the feed-forward parts' activation."""
    return setting("feed_forward.activation", theirs, default, names)


def next_token(
    name: str, logits: str, embeddings: str, *, tied: bool
) -> name_tables.OutputHead:
    """Makes the head of a causal model, from names of arrays; `tied` is a default."""
    return name_tables.OutputHead(
        name,
        {"output.with_bias": False},
        (name_tables.row("logits/w", logits, name_tables.transposed),),
        copies={logits: embeddings},
        rules=(setting("output.tied", "tie_word_embeddings", tied),),
    )


def biases(default: bool) -> Rule:
    """Makes the rule of `attention_bias`: of queries, keys, values and the output."""
    ours_of = ("attention.with_bias", "attention.output_bias")

    return Rule(
        lambda theirs: dict.fromkeys(ours_of, theirs["attention_bias"]),
        {"attention_bias": name_tables.key(default, kind=bool)},
    )


# Kinds of rotary positions, and the keys that they read next to base and share.
_ROTARY_KINDS = {
    "default": {},
    "linear": {"factor": at_least_one},
    "llama3": {
        "factor": at_least_one,
        "low_freq_factor": checks.positive_number,
        "high_freq_factor": checks.positive_number,
        "original_max_position_embeddings": LENGTH,
    },
}


@checks.user_mistakes()
def _rotary(theirs: Theirs) -> dict[str, Any]:
    # The older name counts where both are there, and the length outside.
    name = "rope_scaling" if theirs["rope_scaling"] else "rope_parameters"
    inside = theirs[name] or {}
    length = theirs["original_max_position_embeddings"]
    rope = {
        "rope_type": inside.get("type", "default"),
        "rope_theta": theirs["rope_theta"],
        "partial_rotary_factor": theirs["partial_rotary_factor"],
        "original_max_position_embeddings": theirs["max_position_embeddings"],
        **inside,
        **({"original_max_position_embeddings": length} if length else {}),
    }
    kind = rope["rope_type"]
    label = "config.json's kind of rotary positions (rope_type)"
    checks.choice(label, kind, _ROTARY_KINDS)
    if kind == "default":  # transformers reads no share there
        rope["partial_rotary_factor"] = 1.0
    common = {"rope_theta": at_least_one, "partial_rotary_factor": checks.share}
    for key, check in {**common, **_ROTARY_KINDS[kind]}.items():
        check(f"config.json's {name}.{key}", rope.get(key))
    if rope["partial_rotary_factor"] != 1:
        raise ValueError(
            f"config.json's {name}.partial_rotary_factor must be 1 for models that "
            f"rotate whole heads, got {rope['partial_rotary_factor']!r}."
        )
    return {
        # Unused next to frequencies, but says where they come from.
        "embedding.rotary_period": float(rope["rope_theta"]),
        "embedding.frequencies": (
            None if kind == "default" else _frequencies(rope, head_size(theirs))
        ),
    }


# Rotary positions, by which all features of a head turn.
ROTARY = Rule(
    _rotary,
    {
        "rope_parameters": name_tables.key(None, _object, dict | None),
        "rope_scaling": name_tables.key(None, _object, dict | None),
        "rope_theta": name_tables.key(10_000.0, at_least_one),
        "partial_rotary_factor": name_tables.key(1.0, checks.share),
        "original_max_position_embeddings": name_tables.key(None, LENGTH, int | None),
        "head_dim": name_tables.key(None, fields.integer(1, 2**20), int | None),
    },
)


def head_size(theirs: Theirs) -> int:
    """Returns K, the size of a head, from a `config.json`."""
    heads = max(theirs["num_attention_heads"], 1)
    return theirs["head_dim"] or theirs["hidden_size"] // heads


def _frequencies(rope: Theirs, size: int) -> list[float]:
    """Computes radians per position, `[K/2]`.

    Source: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.2, and
    Chen et al. 2023, https://arxiv.org/abs/2306.15595 (linear).
    """
    if size % 2:
        raise ValueError(
            f"config.json's head_dim must be even, to rotate pairs, got {size}."
        )
    result = positions.frequencies_of(size, float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        result = result / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if not low < high:
            raise ValueError(
                "config.json's high_freq_factor must be above low_freq_factor = "
                f"{low!r}, got {high!r}."
            )
        rounds = rope["original_max_position_embeddings"] * result / (2 * np.pi)
        smooth = np.clip((rounds - low) / (high - low), 0, 1)
        result = (1 - smooth) * result / rope["factor"] + smooth * result
    return result.tolist()
