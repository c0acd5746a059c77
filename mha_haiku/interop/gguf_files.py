"""GGUF files, read by the package gguf, under the names of the hub.

llama.cpp stores rotary pairs next to each other for the architecture "llama", and a
byte-pair tokenizer as lists; everything else differs in names and in default values.
"""

import functools
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import arrays, checks
from mha_haiku.interop.families import FAMILIES, name_tables, rules
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

# Fields below the architecture's name, and the keys of config.json.
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
}
_SIZES = ("attention.value_length", "rope.dimension_count")  # of one head
# Fields that change numbers, and the values that change none (a factor of 0 means 1).
# Others are refused.
_NEUTRAL = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none", "linear"),
}
# Fields that llama.cpp does not read for these architectures, and rows of the table.
_UNREAD = "rope.scaling.finetuned rope.scaling.original_context_length vocab_size"
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
# How a text is cut before pairs are merged, by the names of llama.cpp: by one pattern
# after the other; the text between their matches is a piece too.
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "smollm": (r"\p{N}", _GPT_2),
    "qwen2": (_QWEN,),
    "llama-bpe": (_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Reads the fields and the arrays of a GGUF file, dequantized when they are used.

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
    """
    try:
        import gguf
    except ImportError:
        raise checks.ConfigError(
            "A GGUF file needs gguf: pip install 'mha_haiku[interop]'."
        ) from None

    class Reader(gguf.GGUFReader):
        """Reads an array of a field at once; the package takes a second for tokens."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple:
            offset, kinds = orig_offs, gguf.GGUFValueType
            if raw_type != kinds.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(offset, raw_type)
            memory: Any = self.data
            data = memoryview(memory)
            number, count = struct.unpack_from("=IQ", data, offset)
            kind, at, parts = kinds(number), offset + 12, []
            dtype = self.gguf_scalar_to_np.get(kind)
            if dtype is not None:
                parts = [self._get(at, dtype, count)]
                at += parts[0].nbytes
            elif kind == kinds.STRING:
                for _ in range(count):
                    (size,) = struct.unpack_from("=Q", data, at)
                    at += 8 + size
                    parts.append(data[at - size : at])
            else:
                return super()._get_field_parts(offset, raw_type)
            types = [kinds.ARRAY, kind][: 1 + bool(count)]
            return at - offset, parts, [*range(len(parts))], types

    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of gguf, of the disk
        reason = getattr(error, "strerror", None) or error
        message = f"{path} is damaged, truncated or cannot be read: {reason}."
        raise checks.ConfigError(message) from None
    stored = {}
    for x in reader.tensors:
        read_array = functools.partial(gguf.quants.dequantize, x.data, x.tensor_type)
        # GGUF counts axes from the last.
        stored[x.name] = arrays.Stored(tuple(x.shape.tolist()[::-1]), read_array)
    return fields, stored


@checks.user_mistakes()
def translated(
    path: Path, fields: Mapping[str, Any], stored: Mapping[str, arrays.Stored]
) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Translates the fields to a `config.json`, and renames the arrays to match."""
    import gguf

    kind = fields.get("general.architecture")
    kind = checks.choice(f"{path}: the architecture", kind, ("llama", "qwen2", "qwen3"))
    family, head, prefix = FAMILIES[kind], FAMILIES[kind].heads[0], f"{kind}."
    values = {x.removeprefix(prefix): fields[x] for x in fields if x.startswith(prefix)}
    values.setdefault("rope.freq_base", 1e4)
    # They take the values that config.json has for them.
    keys = name_tables.keys_of(family, head)
    config = {
        theirs: keys[theirs].checked(f"{path}: {prefix}{name}", values.pop(name, None))
        for name, theirs in _FIELDS.items()
    }
    neutral = _NEUTRAL | dict.fromkeys(_SIZES, (rules.head_size(config),))
    for name, value in values.items():
        if name not in _UNREAD.split() and value not in neutral.get(name, ()):
            raise ValueError(
                f"{path}: {prefix}{name} = {checks.shown(value)} is not supported: it "
                "may change numbers."
            )
    config |= {
        "model_type": kind,
        "architectures": [head.architecture],
        # Stored as a float32, it says 1e-5 in 17 digits.
        "rms_norm_eps": float(str(np.float32(config["rms_norm_eps"]))),
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
    }
    if (table := stored.get("token_embd.weight")) and table.shape:
        config["vocab_size"] = table.shape[0]
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), num_layers)
    names, result = {}, {}
    for row in name_tables.all_rows(family, head, num_layers):
        names |= {table.get_name(x, (".weight", ".bias")): x for x in row.theirs}
    counts = {"q_proj": heads, "k_proj": config["num_key_value_heads"] or heads}
    for name, array in stored.items():
        theirs = names.get(name, name)
        count = counts.get(theirs.split(".")[-2:][0])
        if count and kind == "llama":
            array = array._replace(read=functools.partial(_halves, array, count))
        result[theirs] = array
    return config, result


def _halves(array: arrays.Stored, num_heads: int) -> np.ndarray:
    """Reads rotary pairs half a head apart instead of side by side."""
    x = array.read()
    pairs = x.reshape(num_heads, -1, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def tokenizer(
    path: Path, fields: Mapping[str, Any], rows: int | None = None
) -> tokenization.Pretrained | None:
    """Reads the tokenizer for `rows` rows as llama.cpp does; None if it cannot."""
    values = {name.removeprefix("tokenizer.ggml."): x for name, x in fields.items()}
    kind, split = values.get("model"), str(values.get("pre"))
    if kind != "gpt2" or split not in _SPLITS:
        _logger.warning(
            f"{path} has a tokenizer of the kind {kind!r}, {split!r}, which is not "
            f"read, and comes without one; 'gpt2' is, with {', '.join(_SPLITS)}."
        )
        return None
    library, is_llama = tokenization.library(), split == "llama-bpe"
    with tokenization.errors_named(str(path)):
        tokens, kinds = values["tokens"], values["token_type"]
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            raise ValueError("its tokens must be different texts")
        pairs = [tuple(pair.split(" ", 1)) for pair in values["merges"]]
        pairs_model = library.models.BPE(ids, pairs, ignore_merges=is_llama)
        result = library.Tokenizer(pairs_model)
        result.add_tokens(
            [
                library.AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        cutters = library.pre_tokenizers
        steps = [cutters.Split(library.Regex(x), "isolated") for x in _SPLITS[split]]
        steps.append(cutters.ByteLevel(add_prefix_space=False, use_regex=False))
        result.pre_tokenizer = cutters.Sequence(steps)
        result.decoder = library.decoders.ByteLevel()
        added = {"bos": values.get("add_bos_token", is_llama)}
        added["eos"] = values.get("add_eos_token", False)
        first, last = (
            [tokens[values[f"{name}_token_id"]]] if is_added else []
            for name, is_added in added.items()
        )
        if first or last:
            result.post_processor = library.processors.TemplateProcessing(
                single=[*first, "$A", *last],
                special_tokens=[(token, ids[token]) for token in first + last],
            )
        content = result.to_str()
    return tokenization.Pretrained(content, rows or 0, rows)
