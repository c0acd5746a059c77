"""GGUF files, read by the package gguf, under the names of the hub.

llama.cpp stores rotary pairs next to each other for the architecture "llama", and a
byte-pair tokenizer as lists; everything else differs in its names, and in the defaults
of missing fields.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from mha_haiku.core import arrays, checks
from mha_haiku.interop.families import FAMILIES, name_tables, rules
from mha_haiku.training.tasks import tokenization

if TYPE_CHECKING:
    import gguf

_logger = logging.getLogger("mha_haiku")

# Supported architectures of GGUF, with their `model_type` and class.
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
}
_OPTIONAL_FIELDS = {"rope.freq_base": "rope_theta", "vocab_size": "vocab_size"}
# Fields that change numbers, and the values they must have if present.
_SUPPORTED = {
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.sliding_window": (0,),
    "embedding_scale": (),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (),
    "pooling_type": (0,),
    "residual_scale": (),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.type": ("none", "linear"),
}
# The factor that divides positions; the second is the older name.
_SCALES = ("rope.scaling.factor", "rope.scale_linear")
# Fields that llama.cpp does not read for these architectures and scalings.
_UNREAD = (
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "use_parallel_residual",
)
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
# Numbers and texts in a header; vocabularies of 200,000 tokens take about 2**20.
_MOST_PARTS = 2**22
# What gguf raises where a file is not as it says.
_DAMAGE = ArithmeticError, LookupError, MemoryError, RecursionError, ValueError


def read(path: Path) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Reads the fields and the arrays of a GGUF file.

    Arrays stay on the disk until they are read, which dequantizes them.

    Raises:
      ConfigError: If gguf is missing, or the file cannot be read.

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

        def _get(
            self,
            offset: int,
            dtype: DTypeLike,
            count: int | np.integer = 1,
            override_order: Any = None,
        ):
            # A list may say any length, and gguf reads its entries one by one.
            self.num_parts += 1
            if self.num_parts > _MOST_PARTS:
                raise ValueError(f"its header has more than {_MOST_PARTS:,} parts")
            # In a third of the time of gguf's own slices of a memmap.
            return np.frombuffer(self.data, dtype, int(count), offset)

    arrays.mapped(path)  # refuses what is no regular file, empty, or full of holes
    try:
        with np.errstate(over="raise"):  # of a place past the end of the file
            reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except _DAMAGE as error:
        raise checks.ConfigError(
            f"{path} is damaged, truncated or not a readable GGUF file: {error}."
        ) from None
    arrays.check_apart(
        path,
        [(x.data_offset, x.data_offset + x.n_bytes, x.name) for x in reader.tensors],
    )
    stored = {
        # GGUF counts axes from the last.
        x.name: arrays.Stored(
            tuple(reversed(x.shape.tolist())),
            functools.partial(_dequantized, path, x.name, x.data, x.tensor_type),
        )
        for x in reader.tensors
    }
    return fields, stored


def _dequantized(
    path: Path, name: str, data: np.ndarray, kind: "gguf.GGMLQuantizationType"
) -> np.ndarray:
    import gguf

    try:
        return gguf.quants.dequantize(data, kind)
    except NotImplementedError:
        raise checks.ConfigError(
            f"{path} has {name} in the quantization {kind.name}, which gguf cannot "
            "read."
        ) from None


def translated(
    path: Path, fields: Mapping[str, Any], stored: Mapping[str, arrays.Stored]
) -> tuple[dict[str, Any], dict[str, arrays.Stored]]:
    """Translates the fields to a `config.json`, and renames the arrays to match."""
    kind, config = _config(path, fields)
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


@checks.user_mistakes()
def _config(path: Path, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Reads the architecture, and checks all fields that are read here or later."""
    kind = fields.get("general.architecture")
    kind = checks.choice(f"{path}: the architecture", kind, _CLASSES, checks.meant)
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
    size = rules.head_size(config)
    supported = {
        **_SUPPORTED,
        "attention.value_length": (size,),
        "rope.dimension_count": (size,),
    }
    for name, value in own.items():
        if value not in supported.get(name, (value,)):
            raise checks.ConfigError(
                f"{path}: {prefix}{name} = {checks.shown(value)} is not supported."
            )
    known = {*_FIELDS, *_OPTIONAL_FIELDS, *supported, *_SCALES, *_UNREAD}
    if unknown := [prefix + name for name in own if name not in known]:
        raise checks.ConfigError(
            f"{path}: {checks.listed(unknown)} is not supported: it may change numbers."
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

    # With the default of llama.cpp for a missing field.
    def read(
        name: str, default: Any, wanted: str, accepts: Callable[[Any], bool]
    ) -> Any:
        name = f"tokenizer.ggml.{name}"
        if name not in fields:
            if default is _NEEDED:
                raise checks.ConfigError(f"{path} lacks {name}: it must be {wanted}.")
            return default
        if not accepts(fields[name]):
            raise checks.ConfigError(
                f"{path}: {name} must be {wanted}, got {checks.shown(fields[name])}."
            )
        return fields[name]

    if (kind := read("model", None, "a text", _is_text)) is None:
        return None
    split = read("pre", "default", "a text", _is_text)
    if kind != "gpt2" or split not in _SPLITS:
        _logger.warning(
            f"{path} has a tokenizer of the kind {kind!r}, {split!r}, which is not "
            f"read, and comes without one; 'gpt2' is, with {', '.join(_SPLITS)}."
        )
        return None
    tokens = read("tokens", _NEEDED, "a list of different texts", _are_different_texts)
    merges = read("merges", _NEEDED, "a list of pairs, as 'a b'", _are_pairs)
    kinds = read(
        "token_type",
        [_NORMAL] * len(tokens),
        f"a list of {len(tokens)} integers, one of each token",
        lambda x: (
            isinstance(x, list) and [type(kind) for kind in x] == [int] * len(tokens)
        ),
    )
    around = {}
    for place, is_there in (("bos", split == "llama-bpe"), ("eos", False)):
        name, is_bool = f"add_{place}_token", lambda x: isinstance(x, bool)
        if read(name, is_there, "True or False", is_bool):
            token = read(
                f"{place}_token_id",
                _NEEDED,
                f"an integer from 0 to {len(tokens) - 1}",
                lambda x: type(x) is int and 0 <= x < len(tokens),
            )
            around[place] = tokens[token], token
    library = tokenization.library()
    with tokenization.errors_named(str(path)):
        ids = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(pair.split(" ", 1)) for pair in merges]
        result = library.Tokenizer(
            library.models.BPE(ids, pairs, ignore_merges=split == "llama-bpe")
        )
        added = [
            library.AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        result.add_tokens(added)
        cutters = library.pre_tokenizers
        result.pre_tokenizer = cutters.Sequence(
            [
                *(cutters.Split(library.Regex(x), "isolated") for x in _SPLITS[split]),
                cutters.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        result.decoder = library.decoders.ByteLevel()
        if around:
            first, last = (
                [around[x][0]] if x in around else [] for x in ("bos", "eos")
            )
            result.post_processor = library.processors.TemplateProcessing(
                single=[*first, "$A", *last],
                pair=[*first, "$A", *last, *first, "$B", *last],
                special_tokens=list(around.values()),
            )
        content = result.to_str()
    return tokenization.Pretrained(content, rows or 0, rows)


_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # kinds of tokens in GGUF
_NEEDED = object()

# How a text is cut before pairs are merged, by the names of llama.cpp: by one pattern
# after the other; the text between their matches is a piece too.
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS = {
    "gpt-2": (_GPT_2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT_2),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _are_different_texts(x: Any) -> bool:
    are_texts = isinstance(x, list) and all(map(_is_text, x))
    return are_texts and 0 < len(x) == len(set(x))


def _are_pairs(x: Any) -> bool:
    return isinstance(x, list) and all(_is_text(y) and " " in y[1:-1] for y in x)


def _renamed(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return _NAMES.get(name, name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_NAMES.get(part, part)}.{kind}"


def _with_halves(
    config: Mapping[str, Any], stored: Mapping[str, arrays.Stored]
) -> dict[str, arrays.Stored]:
    """Reorders rotary pairs: half a head apart instead of side by side."""
    result = dict(stored)
    num_heads = config["num_attention_heads"]
    counts = {"q_proj": num_heads, "k_proj": config["num_key_value_heads"] or num_heads}

    def read(array: arrays.Stored, count: int) -> np.ndarray:
        x = array.read()
        pairs = x.reshape(count, -1, 2, *x.shape[1:])
        return pairs.swapaxes(1, 2).reshape(x.shape)

    for name, array in stored.items():
        if count := counts.get(name.split(".")[-2] if "." in name else ""):
            result[name] = array._replace(read=functools.partial(read, array, count))
    return result
