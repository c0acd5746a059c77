"""Fields of `config.json` that several families share, and how they are read.

Files of `transformers` 4 and of 5 say the same things in other words: rotary positions
as `rope_theta` and `rope_scaling`, or as `rope_parameters`; windows by a pattern, or by
`layer_types`. Both are read, and what is written opens in both.

L layers, D width, H heads, F hidden units, K size of a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mha_haiku.core import checks
from mha_haiku.core.positions import encodings
from mha_haiku.interop.families import changes, tables
from mha_haiku.interop.families.tables import CannotSayError, Rule, Setting

Theirs = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
HIDDEN = {"gelu": "gelu", "relu": "relu", "tanh": "tanh"}  # of the layer before logits

NO_LOGITS = {"output.logits": False}

# Options that would change numbers and that no family supports otherwise.
SUPPORTED = {
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "quantization_config": (None,),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "use_bidirectional_attention": (None, False),
}
_ROTARY_KINDS = ("default", "linear", "llama3")
_WINDOW = 4096  # where `sliding_window` is left out, including the query


def _labels(theirs: Theirs) -> dict[str, Any]:
    names = theirs.get("id2label")
    return {"num_classes": len(names) if names else theirs.get("num_labels", 2)}


def _write_labels(ours: Theirs) -> dict[str, Any]:
    names = {str(c): f"LABEL_{c}" for c in range(ours["num_classes"])}
    return {"id2label": names, "label2id": {name: int(c) for c, name in names.items()}}


# Classes other than tokens.
LABELS = Rule(_labels, _write_labels)


def sizes(
    *defaults: int,
    names: Sequence[str] = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
    ),
) -> tuple[Setting, ...]:
    """Makes the settings of L, D, H and F; without defaults all must be given."""
    ours = (
        "num_layers",
        "model_size",
        "attention.num_heads",
        "feed_forward.hidden_size",
    )
    return tuple(map(Setting, ours, names, defaults or [tables.REQUIRED] * 4))


def activation(
    theirs: str, default: str, names: Mapping[str, str] = ACTIVATIONS
) -> Setting:
    """Makes the setting of the feed-forward parts' activation."""
    return Setting("feed_forward.activation", theirs, default, names)


def next_token(
    name: str, logits: str, embeddings: str, *settings: Setting | Rule, tied: bool
) -> tables.Head:
    """Makes the head of a causal model, from names of arrays; `tied` is a default."""
    return tables.Head(
        name,
        {"output.with_bias": False},
        (tables.row("logits/w", logits, changes.transposed),),
        copies={logits: embeddings},
        settings=(Setting("output.tied", "tie_word_embeddings", tied), *settings),
    )


# A table of positions whose first rows are unused.
POSITIONS_AFTER_PADDING = Rule(
    lambda theirs: {
        "embedding.max_length": theirs.get("max_position_embeddings", 512)
        - theirs.get("pad_token_id", 1)
        - 1
    },
    lambda ours: {
        "max_position_embeddings": ours["embedding.max_length"] + 2,
        "pad_token_id": 1,
    },
)


def biases(default: bool) -> Rule:
    """Makes the rule of `attention_bias`: of queries, keys, values and the output."""
    ours_of = ("attention.with_bias", "attention.output_bias")

    def write(ours):
        if ours[ours_of[0]] != ours[ours_of[1]]:
            raise CannotSayError("biases of queries, keys and values alone")
        return {"attention_bias": ours[ours_of[0]]}

    return Rule(
        lambda theirs: dict.fromkeys(ours_of, theirs.get("attention_bias", default)),
        write,
    )


def windows(is_local: Callable[[Theirs, int], bool], *, optional: bool = False) -> Rule:
    """Makes the rule of the positions that each layer's queries see.

    `is_local` says whether a layer has a window where `layer_types` does not. With
    `optional` it counts only with `use_sliding_window`: Qwen's configs have a window
    that most models do not use.
    """

    def read(theirs):
        window = theirs.get("sliding_window", _WINDOW)
        if optional and not theirs.get("use_sliding_window", False):
            window = None
        kinds = theirs.get("layer_types") or [
            "sliding_attention" if is_local(theirs, i) else "full_attention"
            for i in range(theirs["num_hidden_layers"])
        ]
        for kind in kinds:
            with checks.user_mistakes():
                known = ("sliding_attention", "full_attention")
                checks.choice("config.json's layer_types", kind, known)
        if window is None:
            return {"attention.window": None}
        # Theirs counts the query itself, ours the positions before it.
        sizes = [window - 1 if kind == "sliding_attention" else None for kind in kinds]
        is_one = all(size == sizes[0] for size in sizes)
        return {"attention.window": sizes[0] if is_one else sizes}

    def write(ours):
        num_layers, window = ours["num_layers"], ours["attention.window"]
        each = _of_layers(window, num_layers)
        sizes = {size for size in each if size is not None}
        if len(sizes) > 1:
            raise CannotSayError(f"windows of {len(sizes)} sizes")
        kinds = ["full_attention" if w is None else "sliding_attention" for w in each]
        used = {
            "use_sliding_window": bool(sizes),
            "max_window_layers": 0 if sizes else num_layers,
        }
        return {
            "sliding_window": sizes.pop() + 1 if sizes else None,
            "layer_types": kinds,
            **(used if optional else {}),
        }

    return Rule(read, write)


def one_window() -> Rule:
    """Makes the rule of Mistral: one window for all layers, or none."""
    rule = windows(lambda theirs, i: True)

    def write(ours):
        if isinstance(ours["attention.window"], list | tuple):
            raise CannotSayError("windows that differ by layer")
        return {"sliding_window": rule.write(ours)["sliding_window"]}

    return Rule(rule.read, write)


def rotary(share: float = 1.0) -> Rule:
    """Returns the rule of rotary positions of one kind, of a `share` by default."""

    def read(theirs):
        rope = _rope(theirs, 10_000.0, share)
        return _frequencies_field([rope], head_size(theirs))

    def write(ours):
        rope = _written_rope(
            ours["embedding.frequencies"], ours["embedding.rotary_period"]
        )
        return {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}

    return Rule(read, write)


def rotary_by_layer(kinds: Rule) -> Rule:
    """Returns the rule of Gemma 3: layers with a window, by `kinds`, differ."""
    theta, local_theta = 1e6, 1e4  # where `config.json` does not say them

    def read(theirs):
        given = theirs.get("rope_parameters") or {}
        full = _rope({**theirs, "rope_parameters": given.get("full_attention")}, theta)
        local = given.get("sliding_attention") or {
            "rope_theta": theirs.get("rope_local_base_freq", local_theta)
        }
        local = _rope({"rope_parameters": local}, local_theta)
        windows = kinds.read(theirs)["attention.window"]
        windows = _of_layers(windows, theirs["num_hidden_layers"])
        ropes = [full if w is None else local for w in windows]
        return _frequencies_field(ropes, head_size(theirs))

    def write(ours):
        num_layers, frequencies = ours["num_layers"], ours["embedding.frequencies"]
        if frequencies is None or not isinstance(frequencies[0], list | tuple):
            frequencies = [frequencies] * num_layers
        windows = _of_layers(ours["attention.window"], num_layers)
        ropes: dict[str, Any] = {}
        for each, w in zip(frequencies, windows, strict=True):
            kind = "full_attention" if w is None else "sliding_attention"
            rope = _written_rope(each, ours["embedding.rotary_period"])
            if ropes.setdefault(kind, rope) != rope:
                raise CannotSayError("rotary frequencies that differ by layer")
        for kind in ("full_attention", "sliding_attention"):
            ropes.setdefault(kind, {"rope_type": "default", "rope_theta": theta})
        return {
            "rope_parameters": ropes,
            "rope_theta": ropes["full_attention"]["rope_theta"],
            "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
        }

    return Rule(read, write)


def _of_layers(given: Any, num_layers: int) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given] * num_layers


def head_size(theirs: Theirs) -> int:
    """Reads K, the size of a head, from a `config.json`."""
    default = theirs["hidden_size"] // theirs["num_attention_heads"]
    return theirs.get("head_dim") or default


def turning(theirs: Theirs, share: float) -> int:
    """Counts how many of a head's K features rotary positions turn."""
    return int(
        head_size(theirs) * _rope(theirs, 10_000.0, share)["partial_rotary_factor"]
    )


def _rope(theirs: Theirs, theta: float, share: float = 1.0) -> dict[str, Any]:
    """Describes rotary positions in the words of `transformers` 5."""
    given = theirs.get("rope_parameters")
    if given is None:
        given = dict(theirs.get("rope_scaling") or {})
        given.setdefault("rope_type", given.pop("type", "default"))
        theta = theirs.get("rope_theta", theirs.get("rotary_emb_base", theta))
        share = theirs.get("rotary_pct", theirs.get("partial_rotary_factor", share))
        given |= {"rope_theta": theta, "partial_rotary_factor": share}
    defaults = {"rope_type": "default", "rope_theta": theta}
    rope = {**defaults, "partial_rotary_factor": share, **given}
    with checks.user_mistakes():
        name = "config.json's kind of rotary positions (rope_type)"
        checks.choice(name, rope["rope_type"], _ROTARY_KINDS)
    return rope


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
    """Computes radians per position, `[K/2]`; features that do not turn have 0.

    Source: Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.2, and
    Chen et al. 2023, https://arxiv.org/abs/2306.15595 (linear).
    """
    turns = int(size * rope["partial_rotary_factor"])
    result = encodings.frequencies_of(turns, float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        result = result / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        rounds = rope["original_max_position_embeddings"] * result / (2 * np.pi)
        smooth = np.clip((rounds - low) / (high - low), 0, 1)
        result = (1 - smooth) * result / rope["factor"] + smooth * result
    return [*result.tolist(), *[0.0] * ((size - turns) // 2)]


def _written_rope(frequencies: Any, period: float) -> dict[str, Any]:
    """Describes rotary positions of given frequencies, if they have a name."""
    if frequencies is None:
        return {"rope_type": "default", "rope_theta": float(period)}
    given = np.array(frequencies, float)
    turning = given[given > 0]
    if given.ndim > 1 or not len(turning) or (given[: len(turning)] == 0).any():
        raise CannotSayError("these rotary frequencies")
    thetas = [float(period)]
    if len(turning) > 1:
        thetas.append(_rounded((turning[0] / turning[1]) ** len(turning)))
    share = len(turning) / len(given)
    for theta in thetas:
        rope = {"rope_theta": theta, "partial_rotary_factor": share}
        plain = encodings.frequencies_of(2 * len(turning), theta)
        for scaling in _scalings(turning / plain, plain / (2 * np.pi)):
            written = {**scaling, **rope}
            again = _frequencies(written, 2 * len(given))
            if np.allclose(again, given, rtol=1e-9, atol=0):
                return written
    raise CannotSayError("these rotary frequencies")


def _scalings(ratio: np.ndarray, rounds: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yields the kinds of rotary positions that may have scaled frequencies so.

    They had `rounds` turns per position, and were multiplied by `ratio`.
    """
    yield {"rope_type": "default"}
    yield {"rope_type": "linear", "factor": _rounded(1 / ratio[0])}
    least = ratio.min()
    between = (ratio > least * (1 + 1e-9)) & (ratio < 1 - 1e-9)
    if between.sum() > 1:
        # Llama 3 goes from 1 / factor to 1 along a line in the rounds. Of its three
        # numbers two count: the lower is 1, as in all published models.
        share = (ratio[between] - least) / (1 - least)
        slope, start = np.polyfit(rounds[between], share, 1)
        if start < 0:
            yield {
                "rope_type": "llama3",
                "factor": _rounded(1 / least),
                "low_freq_factor": 1.0,
                "high_freq_factor": _rounded(1 - 1 / start),
                "original_max_position_embeddings": round(-slope / start),
            }


def _rounded(number: float) -> float:
    """Rounds to 9 digits, which removes the rounding errors of powers."""
    return float(f"{number:.9g}")
