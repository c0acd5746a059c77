"""Tiny models of every family of `transformers`, with numbers that are no chance.

The same numbers can be made without torch, so that what `transformers` computes is
stored once (`expected.json`, by scripts/expect_transformers.py) and compared with every
day.
"""

import copy
import json
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import arrays

B, T = 3, 9
LENGTHS = np.array([9, 5, 7])  # past a window of 4
WINDOW = 4
EXPECTED = pathlib.Path(__file__).with_name("expected.json")

# Sizes all differ: D, H, K, F are 24, 4, 6, 20 of BERT's kind; D, H, G, K, F are 24, 6,
# 3, 8, 22 of Llama's.
_BERT = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 14,
    "type_vocab_size": 5,
}
_DISTILBERT = {
    "vocab_size": 31,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 20,
    "max_position_embeddings": 14,
}
_GPT2 = {
    "vocab_size": 31,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 20,
    "n_positions": 14,
}
_LLAMA = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 22,
    "max_position_embeddings": 14,
}
_QWEN2 = dict(_LLAMA)
del _QWEN2["head_dim"]
_OLMO2 = {**_QWEN2, "pad_token_id": None}
_NEOX = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 14,
}
_VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
_LLAMA_3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 13,
}


_LLAMA_3_UNBASED = {
    name: x for name, x in _LLAMA_3_ROTARY.items() if name != "rope_theta"
}
_BY_LAYER = {"full_attention": {"rope_type": "default"}}
# Ways to say rotary positions, where keys disagree above all: a case, and what its
# config.json says in place of what is stored; None: it leaves the key out.
ROTARY: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}),
    *(
        (case, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
        for case in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma2")
    ),
    *(
        (case, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5})
        for case in ("mistral", "qwen2", "qwen3", "olmo2", "gemma", "gemma2")
    ),
    ("llama", {"rope_parameters": {"type": "linear", "rope_theta": 9.0, "factor": 2}}),
    (
        "llama",
        {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 2}},
    ),
    ("llama", {"rope_scaling": {}, "rope_theta": 50.0}),
    ("llama", {"rope_parameters": {}, "rope_theta": 50.0}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 33.0}}),
    ("llama", {"partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rotary_emb_base": 7}),
    ("llama", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_scaling": _LLAMA_3_UNBASED, "rope_theta": 10.0}),
    (
        "llama",
        {"rope_scaling": _LLAMA_3_ROTARY, "original_max_position_embeddings": 40},
    ),
    (
        "llama",
        {
            "rope_scaling": {
                **_LLAMA_3_UNBASED,
                "original_max_position_embeddings": None,
            },
            "max_position_embeddings": 40,
        },
    ),
    ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 50, "rotary_pct": 0.75}),
    ("gpt_neox", {"rope_parameters": {}, "rotary_emb_base": 50, "rotary_pct": 1.0}),
    (
        "gpt_neox",
        {"rope_parameters": None, "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    ),
    (
        "gpt_neox",
        {"rope_parameters": {"partial_rotary_factor": 1.0}, "rotary_pct": 0.5},
    ),
    (
        "gpt_neox",
        {
            "rope_scaling": {"type": "linear", "factor": 2},
            "rotary_emb_base": 50,
            "rotary_pct": 0.5,
        },
    ),
    ("gpt_neox", {"rope_scaling": {**_LLAMA_3_ROTARY, "partial_rotary_factor": 1.0}}),
    (
        "gemma3",
        {
            "rope_parameters": {**_BY_LAYER, "sliding_attention": {}},
            "rope_theta": 5e5,
            "rope_local_base_freq": 77.0,
        },
    ),
    ("gemma3", {"rope_parameters": _BY_LAYER, "rope_local_base_freq": 77.0}),
    *(
        (
            "gemma3",
            {
                "rope_parameters": None,
                "rope_theta": 5e5,
                "rope_scaling": {name: "linear", "factor": 8.0},
            },
        )
        for name in ("rope_type", "type")
    ),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"type": "linear", "factor": 8, "rope_theta": 4.0},
                "sliding_attention": None,
            },
            "rope_local_base_freq": 7.0,
            "partial_rotary_factor": 1.0,
        },
    ),
    (
        "gemma3",
        {
            "rope_parameters": {
                **_BY_LAYER,
                "sliding_attention": {"rope_type": "linear", "factor": 2},
            }
        },
    ),
    ("gemma3", {"rope_parameters": None, "rope_scaling": _LLAMA_3_UNBASED}),
]


class Case(NamedTuple):
    """A tiny model: its classes in `transformers` and what its config says."""

    config: str
    model: str
    fields: dict[str, Any]


CASES = {
    "bert": Case("BertConfig", "BertForMaskedLM", _BERT),
    "bert_classes": Case(
        "BertConfig", "BertForSequenceClassification", {**_BERT, "num_labels": 7}
    ),
    "bert_tokens": Case(
        "BertConfig", "BertForTokenClassification", {**_BERT, "num_labels": 7}
    ),
    "bert_sentences": Case("BertConfig", "BertModel", _BERT),
    "bert_pretraining": Case("BertConfig", "BertForPreTraining", _BERT),
    "roberta": Case("RobertaConfig", "RobertaForMaskedLM", _BERT),
    "roberta_classes": Case(
        "RobertaConfig", "RobertaForSequenceClassification", {**_BERT, "num_labels": 7}
    ),
    "roberta_tokens": Case(
        "RobertaConfig", "RobertaForTokenClassification", {**_BERT, "num_labels": 7}
    ),
    "distilbert": Case("DistilBertConfig", "DistilBertForMaskedLM", _DISTILBERT),
    "distilbert_tokens": Case(
        "DistilBertConfig",
        "DistilBertForTokenClassification",
        {**_DISTILBERT, "num_labels": 7},
    ),
    "distilbert_classes": Case(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {**_DISTILBERT, "num_labels": 7},
    ),
    "bert_untied": Case(
        "BertConfig", "BertForMaskedLM", {**_BERT, "tie_word_embeddings": False}
    ),
    "gpt2": Case("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gpt2_scaled": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **_GPT2,
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
        },
    ),
    "gpt2_bare": Case("GPT2Config", "GPT2Model", _GPT2),
    "llama_bare": Case("LlamaConfig", "LlamaModel", _LLAMA),
    "llama": Case("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "llama_3": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA,
            "rope_parameters": _LLAMA_3_ROTARY,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Case(
        "MistralConfig", "MistralForCausalLM", {**_LLAMA, "sliding_window": WINDOW}
    ),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", _QWEN2),
    "qwen2_windows": Case(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            **_QWEN2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", _LLAMA),
    "olmo2": Case("Olmo2Config", "Olmo2ForCausalLM", _OLMO2),
    "gemma": Case("GemmaConfig", "GemmaForCausalLM", _LLAMA),
    "gemma2": Case(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_LLAMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 5},
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_LLAMA,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_neox": Case("GPTNeoXConfig", "GPTNeoXForCausalLM", _NEOX),
    "gpt_neox_in_turn": Case(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            **_NEOX,
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt_neox_whole": Case(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            **_NEOX,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "gpt_neox_bare": Case("GPTNeoXConfig", "GPTNeoXModel", _NEOX),
    "vit": Case("ViTConfig", "ViTForImageClassification", _VIT),
    "vit_bare": Case("ViTConfig", "ViTModel", _VIT),
    "vit_bands": Case(
        "ViTConfig",
        "ViTForImageClassification",
        {**_VIT, "num_channels": 12, "image_size": [8, 12]},
    ),
}


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array in [-1, 1) that depends on nothing but its name and shape."""
    word = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(
        zlib.crc32(name.encode())
    )
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0)):
        word = word ^ (word >> np.uint32(shift))
        if factor:
            word = word * np.uint32(factor)
    return (word / 2**31 - 1).astype(np.float32).reshape(shape)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the numbers of a parameter: about 0.7 for norms, about 0 for others."""
    x = numbers(name, tuple(shape)) * np.float32(0.4)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return x + np.float32(0.7) if is_scale else x


def inputs(case: str) -> np.ndarray:
    """Returns tokens `[B, T]`, none of which is padding; or images."""
    if case.startswith("vit"):
        shape = (B, 12, 8, 12) if case == "vit_bands" else (B, 3, 8, 8)
        return numbers("images", shape)
    return 2 + (numbers("tokens", (B, T)) * 1000).astype(np.int32) % 29


def write(
    folder: pathlib.Path, case: str, *, key_value_heads: int | None = None
) -> pathlib.Path:
    """Writes the files of a case as `transformers` would, and returns their folder.

    Args:
      folder: Where to.
      case: One of `CASES`.
      key_value_heads: Their number, where the case groups heads; None: as stored.
    """
    stored = expected()[case]
    config, shapes = stored["config"], stored["arrays"]
    stored_heads = config.get("num_key_value_heads")
    if key_value_heads and stored_heads:
        config["num_key_value_heads"] = key_value_heads
        for name, shape in shapes.items():
            if ".k_proj." in name or ".v_proj." in name:
                shape[0] = shape[0] * key_value_heads // stored_heads
    (folder / "config.json").write_text(json.dumps(config))
    arrays.write_safetensors(
        folder / "model.safetensors",
        {name: parameter(name, shape) for name, shape in shapes.items()},
    )
    return folder


def expected() -> dict[str, Any]:
    """Returns what `transformers` computed, by cases."""
    return json.loads(EXPECTED.read_text())


def changed(case: str, change: dict[str, Any]) -> dict[str, Any]:
    """Returns a case's config.json with other values; None leaves a key out.

    So do keys of None within `rope_scaling`.
    """
    config = {**expected()[case]["config"], **copy.deepcopy(change)}
    if scaling := config.get("rope_scaling"):
        config["rope_scaling"] = {k: x for k, x in scaling.items() if x is not None}
    return {
        name: x for name, x in config.items() if name not in change or x is not None
    }


def valid(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the array, batch first, with zeros at padded positions of an axis."""
    if x.shape[axis] != T:
        return x
    shape = [1] * x.ndim
    shape[0], shape[axis] = B, T
    return x * (np.arange(T) < LENGTHS[:, None]).reshape(shape)


def sample(x: np.ndarray) -> list[float]:
    """Returns some of an array's numbers: enough to tell it from any other."""
    flat = np.asarray(x, np.float64).ravel()
    step = max(1, flat.size // 24) | 1
    projection = flat @ numbers("projection", flat.shape) / np.sqrt(flat.size)
    return [*flat[::step].tolist(), float(projection)]
