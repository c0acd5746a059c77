"""GGUF files, read by the package gguf, under the names of the hub.

llama.cpp stores rotary pairs next to each other for the architecture "llama", and a
byte-pair tokenizer as lists; everything else differs in its names, and in the defaults
of missing fields.
"""

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import arrays, checks
from mha_haiku.interop.families import FAMILIES, name_tables, rules
from mha_haiku.training.tasks import tokenization

_logger = logging.getLogger("mha_haiku")

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
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
}
_OPTIONAL_FIELDS = {"rope.freq_base": "rope_theta", "vocab_size": "vocab_size"}
# Fields that change numbers, and the values that change none. Others are refused.
_NEUTRAL = {
    "attention.causal": (True,),
    **dict.fromkeys(("attention.sliding_window", "pooling_type"), (0,)),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.type": ("none", "linear"),
}
# The factor that divides positions; the second is the older name.
_SCALES = ("rope.scaling.factor", "rope.scale_linear")
# Fields that llama.cpp does not read for these architectures and scalings.
_UNREAD = "rope.scaling.finetuned rope.scaling.original_context_length".split()
_UNREAD += ["tensor_data_layout", "use_parallel_residual"]
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Numbers and texts in a header (vocabularies of 200,000 tokens take about 2**20), bytes
# of a text, and axes of an array.
_MOST_PARTS, _MOST_BYTES, _AXES = 2**22, 2**20, (1, 4)
# What gguf raises where a file is not as it says.
_DAMAGE = ArithmeticError, LookupError, MemoryError, RecursionError, ValueError
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # kinds of tokens
# How a text is cut before pairs are merged, by the names of llama.cpp: by one pattern
# after the other; the text between their matches is a piece too.
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "gpt-2": (_GPT_2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT_2),
    "qwen2": (_QWEN,),
    "llama-bpe": (_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Reads the fields and the arrays of a GGUF file.

    Arrays stay on the disk until they are read, which dequantizes them.

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
    """
    try:
        import gguf
    except ImportError:
        raise checks.ConfigError(
            "A GGUF file needs gguf: pip install 'mha_haiku[interop]'."
        ) from None

    class Reader(gguf.GGUFReader):
        """Refuses to read past the end of the file, where gguf returns empty values."""

        num_parts = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, *_: Any, **__: Any):
            # A list may say any length, and gguf reads its entries one by one.
            self.num_parts += 1
            if self.num_parts > _MOST_PARTS:
                raise ValueError(f"its header has more than {_MOST_PARTS:,} parts")
            # In a third of the time of gguf's own slices of a memmap.
            return np.frombuffer(self.data, dtype, int(count), offset)

        def _get_str(self, offset: int):
            length, text = super()._get_str(offset)
            if len(text) > _MOST_BYTES:
                raise ValueError(f"it has a text of more than {_MOST_BYTES:,} bytes")
            return length, text

    def dequantized(array: Any) -> np.ndarray:
        try:
            return gguf.quants.dequantize(array.data, array.tensor_type)
        except NotImplementedError:
            raise checks.ConfigError(
                f"{path} has {array.name} in the quantization "
                f"{array.tensor_type.name}, which gguf cannot read."
            ) from None

    try:
        with np.errstate(over="raise"):  # of a place past the end of the file
            reader = Reader(checks.regular_file(path))
        for x in reader.tensors:
            checks.integer_in(f"the number of axes of {x.name}", len(x.shape), *_AXES)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise checks.ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except _DAMAGE as error:
        raise checks.ConfigError(
            f"{path} is damaged, truncated or not a readable GGUF file: {error}."
        ) from None
    # GGUF counts axes from the last.
    return fields, {
        x.name: arrays.Stored(
            tuple(reversed(x.shape.tolist())), functools.partial(dequantized, x)
        )
        for x in reader.tensors
    }


def translated(
    path: Path, fields: Mapping[str, Any], stored: Mapping[str, arrays.Stored]
) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Translates the fields to a `config.json`, and renames the arrays to match."""
    kind, config = _config(path, fields)
    # llama.cpp stores factors of rotary frequencies as an array.
    if "rope_freqs.weight" in stored:
        raise checks.ConfigError(
            f"{path}: rope_freqs.weight, factors of rotary frequencies, is not "
            "supported; the same model as safetensors is."
        )
    if (table := stored.get("token_embd.weight")) is not None:
        config.setdefault("vocab_size", table.shape[0])
    config |= {
        "model_type": kind,
        "architectures": [FAMILIES[kind].heads[0].architecture],
        "tie_word_embeddings": "output.weight" not in stored,
    }
    if "blk.0.attn_output.bias" in stored:
        config["attention_bias"] = True
    heads = config["num_attention_heads"]
    counts = {"q": heads, "k": config["num_key_value_heads"] or heads}
    names, result = _names(kind), {}
    for name, array in stored.items():
        layer = _BLOCK.match(name)
        theirs = names.get(_BLOCK.sub("blk.0.", name, 1), name)
        if layer is not None:
            theirs = theirs.replace("layers.0.", f"layers.{layer[1]}.", 1)
        part = re.fullmatch(r".*\.self_attn\.([qk])_proj\.\w+", theirs)
        if kind == "llama" and part is not None:
            halves = functools.partial(_halves, array, counts[part[1]])
            array = array._replace(read=halves)
        result[theirs] = array
    return config, result


def _names(kind: str) -> dict[str | None, str]:
    """Maps our names of arrays, outside of layers and in layer 0, to the hub's."""
    import gguf

    family = FAMILIES[kind]
    layer = family.prefix + family.layer.format(0)
    rows = [*family.heads[0].rows, *(x.below("", family.prefix) for x in family.rows)]
    rows += [x.below("", layer) for x in family.layer_rows]
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), 1)
    theirs = [name for row in rows for name in row.theirs]
    return {table.get_name(name, (".weight", ".bias")): name for name in theirs}


def _halves(array: arrays.Stored, num_heads: int) -> np.ndarray:
    """Reads rotary pairs half a head apart instead of side by side."""
    x = array.read()
    pairs = x.reshape(num_heads, -1, 2, *x.shape[1:])
    return pairs.swapaxes(1, 2).reshape(x.shape)


@checks.user_mistakes()
def _config(path: Path, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Reads the architecture, and checks all fields that are read here or later."""
    kind = fields.get("general.architecture")
    kind = checks.choice(
        f"{path}: the architecture", kind, _ARCHITECTURES, checks.meant
    )
    prefix = f"{kind}."
    own = {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix)
    }
    # They take the values that config.json has for them.
    keys = name_tables.keys_of(FAMILIES[kind], FAMILIES[kind].heads[0])
    names = {name: x for name, x in _OPTIONAL_FIELDS.items() if name in own}
    config = {
        theirs: keys[theirs].checked(f"{path}: {prefix}{name}", own.get(name))
        for name, theirs in {**_FIELDS, **names}.items()
    }
    size, sized = (
        rules.head_size(config),
        ("attention.value_length", "rope.dimension_count"),
    )
    neutral = _NEUTRAL | dict.fromkeys(sized, (size,))
    known = {*_FIELDS, *_OPTIONAL_FIELDS, *_SCALES, *_UNREAD}
    for name, value in own.items():
        if name not in known and value not in neutral.get(name, ()):
            raise checks.ConfigError(
                f"{path}: {prefix}{name} = {checks.shown(value)} is not supported: it "
                "may change numbers."
            )
    # Stored as a float32, it says 1e-5 in 17 digits.
    config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    scales = [(f"{path}: {prefix}{name}", own[name]) for name in _SCALES if name in own]
    if scales and scales[0][1] != 0:  # 0 encodes 1
        factor = rules.at_least_one(*scales[0])
        if own.get("rope.scaling.type") != "none":  # left out, it is linear
            config["rope_parameters"] = {"rope_type": "linear", "factor": factor}
    return kind, config


def tokenizer(
    path: Path, fields: Mapping[str, Any], rows: int | None = None
) -> tokenization.Pretrained | None:
    """Reads the tokenizer of the file, or returns None, with a warning if unsupported.

    `rows` are the rows of the model's embedding; by default as many as there are
    tokens.
    """
    said = {name.removeprefix("tokenizer.ggml."): x for name, x in fields.items()}
    kind, split = said.get("model"), said.get("pre", "default")
    if kind is None:
        return None
    if kind != "gpt2" or str(split) not in _SPLITS:
        _logger.warning(
            f"{path} has a tokenizer of the kind {kind!r}, {split!r}, which is not "
            f"read, and comes without one; 'gpt2' is, with {', '.join(_SPLITS)}."
        )
        return None
    with tokenization.errors_named(str(path)):
        content = _tokenizer(said, split)
    return tokenization.Pretrained(content, rows or 0, rows)


def _tokenizer(said: Mapping[str, Any], split: str) -> str:
    """Makes a tokenizer.json; where fields are missing, as llama.cpp does."""
    library, tokens = tokenization.library(), said["tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ValueError("its tokens must be different texts")
    pairs = [tuple(pair.split(" ", 1)) for pair in said["merges"]]
    is_llama = split == "llama-bpe"
    result = library.Tokenizer(library.models.BPE(ids, pairs, ignore_merges=is_llama))
    kinds = said.get("token_type", [_NORMAL] * len(tokens))
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
    first, last = (
        [tokens[said[f"{name}_token_id"]]]
        if said.get(f"add_{name}_token", added)
        else []
        for name, added in (("bos", is_llama), ("eos", False))
    )
    if first or last:
        result.post_processor = library.processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B", *last],
            special_tokens=[(token, ids[token]) for token in first + last],
        )
    return result.to_str()
