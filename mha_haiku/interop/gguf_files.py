"""GGUF files in the words of the hub: fields, arrays, tokenizer.

llama.cpp stores rotary pairs side by side for the architecture "llama", and a byte-pair
tokenizer as lists; all else differs in its names alone.
"""

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import arrays, checks
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

# What GGUF files are read, by the `model_type` of the same, and the class of it.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
# Fields that change numbers, and what they must be where they are there.
_SUPPORTED = {
    "attention.scale": (),
    "attention.sliding_window": (0,),
    "embedding_scale": (),
    "expert_count": (0,),
    "logit_scale": (),
    "residual_scale": (),
    "rope.scaling.type": ("none",),
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def translated(
    path: Path, fields: Mapping[str, Any], stored: Mapping[str, arrays.Stored]
) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Translates the fields to a `config.json`, and renames the arrays to match."""
    kind = fields.get("general.architecture")
    with checks.user_mistakes():
        checks.choice(f"{path}: the architecture", kind, _CLASSES)
        names = f"{kind}.embedding_length", f"{kind}.attention.head_count"
        width, num_heads = (
            checks.positive_integer(f"{path}: {x}", fields.get(x)) for x in names
        )
    size = fields.get(f"{kind}.attention.key_length", width // num_heads)
    for name, accepted in {**_SUPPORTED, "rope.dimension_count": (size,)}.items():
        value = fields.get(f"{kind}.{name}")
        if value is not None and value not in accepted:
            raise checks.ConfigError(
                f"{path}: {kind}.{name} = {value!r} is not supported."
            )
    config = {
        theirs: fields[f"{kind}.{name}"]
        for name, theirs in _FIELDS.items()
        if f"{kind}.{name}" in fields
    }
    # Stored as a float32, it says 1e-5 in 17 digits.
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    table = stored.get("token_embd.weight")
    if table is not None:
        config.setdefault("vocab_size", table.shape[0])
    # llama.cpp stores factors of rotary frequencies as an array.
    if "rope_freqs.weight" in stored:
        raise checks.ConfigError(
            f"{path}: rope_freqs.weight, factors of rotary frequencies, is not "
            "supported; the same model as safetensors is."
        )
    config |= {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "tie_word_embeddings": "output.weight" not in stored,
    }
    if "blk.0.attn_output.bias" in stored:
        config["attention_bias"] = True
    renamed = {_renamed(name): array for name, array in stored.items()}
    if kind == "llama":
        renamed = _with_halves(config, renamed)
    return config, renamed


def tokenizer(
    path: Path, fields: Mapping[str, Any], least_tokens: int = 0
) -> tokenization.Pretrained | None:
    """Reads the tokenizer of the file; None, with a warning if it is not read."""
    kind = fields.get("tokenizer.ggml.model")
    if kind is None:
        return None
    split = fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _SPLITS:
        _logger.warning(
            f"{path} has a tokenizer of the kind {kind!r}, {split!r}, which is not "
            f"read, and comes without one; 'gpt2' is, with {', '.join(_SPLITS)}."
        )
        return None
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not isinstance(fields.get(name), list):
            raise checks.ConfigError(f"{path} lacks {name}.")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type", [])
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    first = None
    if fields.get("tokenizer.ggml.add_bos_token"):
        first = fields.get("tokenizer.ggml.bos_token_id")
        with checks.user_mistakes():
            name = f"{path}: tokenizer.ggml.bos_token_id"
            checks.integer_in(name, first, 0, len(tokens) - 1)
    library = tokenization.library()
    with tokenization.errors_named(str(path)):
        ids = {token: i for i, token in enumerate(tokens)}
        is_llama = split == "llama-bpe"
        model = library.models.BPE(ids, merges, ignore_merges=is_llama)
        result = library.Tokenizer(model)
        added = [
            library.AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        result.add_tokens(added)
        result.pre_tokenizer = _cutting(library, split)
        result.decoder = library.decoders.ByteLevel()
        if first is not None:  # stands before every text
            result.post_processor = library.processors.TemplateProcessing(
                single=[tokens[first], "$A"],
                pair=[tokens[first], "$A", tokens[first], "$B"],
                special_tokens=[(tokens[first], first)],
            )
        content = result.to_str()
    return tokenization.Pretrained(content, least_tokens)


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens in GGUF

# How a text is cut before pairs are merged, by the names of llama.cpp: by a pattern, or
# as GPT-2 does.
_SPLITS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,  # and into single digits
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def _cutting(library: Any, split: str) -> Any:
    """Makes the cutter of texts into pieces of bytes, which stand as letters."""
    kinds, pattern, before = library.pre_tokenizers, _SPLITS[split], []
    if pattern is not None:
        before = [kinds.Split(library.Regex(pattern), "isolated")]
    if split == "smollm":
        before = [kinds.Digits(individual_digits=True)]
    to_bytes = kinds.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    return kinds.Sequence([*before, to_bytes])


def _renamed(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return _NAMES.get(name, name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_NAMES.get(part, part)}.{kind}"


def _with_halves(config, stored) -> dict[str, arrays.Stored]:
    """Reorders rotary pairs: half a head apart instead of side by side."""
    result = dict(stored)
    counts = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads", config["num_attention_heads"]),
    }

    def read(array, count):
        x = array.read()
        pairs = x.reshape(count, -1, 2, *x.shape[1:])
        return pairs.swapaxes(1, 2).reshape(x.shape)

    for name, array in stored.items():
        if count := counts.get(name.split(".")[-2] if "." in name else ""):
            result[name] = array._replace(read=functools.partial(read, array, count))
    return result
