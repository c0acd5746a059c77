"""Tiny models of every family of `transformers`, with numbers that are no chance.

`layouts.json` has their files as `transformers` writes them: config.json, and the names
and shapes of arrays. After a change to `CASES`, with mha_haiku[torch]:
python -m tests.interop.small_models
"""

import copy
import json
import pathlib
import tempfile
import zlib
from typing import Any, NamedTuple

import numpy as np

from mha_haiku.core import arrays

B, T = 3, 9
LENGTHS = np.array([9, 5, 7])  # past a window of 4
WINDOW = 4
_LAYOUTS = pathlib.Path(__file__).with_name("layouts.json")

# Sizes all differ: D, H, K, F are 24, 4, 6, 20 of BERT's kind; D, H, G, K, F are 24, 6,
# 3, 8, 22 of Llama's.
_WORDS = dict(vocab_size=31)
_SIZES = dict(
    _WORDS,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=20,
    max_position_embeddings=14,
)
_BERT = dict(_SIZES, type_vocab_size=5)
_GPT2 = dict(_WORDS, n_embd=24, n_layer=2, n_head=4, n_inner=20, n_positions=14)
_QWEN2 = _SIZES | dict(
    num_attention_heads=6, num_key_value_heads=3, intermediate_size=22
)
_LLAMA = dict(_QWEN2, head_dim=8)
_WINDOWS = dict(_LLAMA, sliding_window=WINDOW)
_CLASSES = dict(num_labels=7)
LLAMA_3_ROTARY = dict(
    rope_type="llama3",
    rope_theta=10.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=3.0,
    original_max_position_embeddings=13,
)


class Case(NamedTuple):
    """A tiny model: its class in `transformers` and what its config says."""

    model: str
    fields: dict[str, Any]


CASES = {
    "bert": Case("BertForMaskedLM", _BERT),
    "bert_classes": Case("BertForSequenceClassification", _BERT | _CLASSES),
    "bert_tokens": Case("BertForTokenClassification", _BERT | _CLASSES),
    "bert_sentences": Case("BertModel", _BERT),
    "bert_pretraining": Case("BertForPreTraining", _BERT),
    "bert_untied": Case("BertForMaskedLM", dict(_BERT, tie_word_embeddings=False)),
    "gpt2": Case("GPT2LMHeadModel", _GPT2),
    "gpt2_bare": Case("GPT2Model", _GPT2),
    "llama_bare": Case("LlamaModel", _LLAMA),
    "llama": Case("LlamaForCausalLM", _LLAMA),
    "llama_3": Case(
        "LlamaForCausalLM",
        dict(
            _LLAMA,
            rope_parameters=LLAMA_3_ROTARY,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "mistral": Case("MistralForCausalLM", _WINDOWS),
    "qwen2": Case("Qwen2ForCausalLM", _QWEN2),
    "qwen3": Case("Qwen3ForCausalLM", _LLAMA),
    "gemma": Case("GemmaForCausalLM", _LLAMA),
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


def inputs() -> np.ndarray:
    """Returns tokens `[B, T]`, none of which is padding."""
    return 2 + (numbers("tokens", (B, T)) * 1000).astype(np.int32) % 29


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Compares to 1e-5 of the largest number."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def write(folder: pathlib.Path, case: str) -> pathlib.Path:
    """Writes the files of a case as `transformers` would, and returns their folder."""
    stored = layouts()[case]
    config, shapes = stored["config"], stored["arrays"]
    (folder / "config.json").write_text(json.dumps(config))
    arrays.write_safetensors(
        folder / "model.safetensors",
        {name: parameter(name, shape) for name, shape in shapes.items()},
    )
    return folder


def layouts() -> dict[str, Any]:
    """Returns each case's config.json, and the shapes of its arrays."""
    return json.loads(_LAYOUTS.read_text())


def changed(case: str, change: dict[str, Any]) -> dict[str, Any]:
    """Returns a case's config.json with other values; None leaves a key out.

    So do keys of None within `rope_scaling`.
    """
    config = {**layouts()[case]["config"], **copy.deepcopy(change)}
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


def layout(case: str) -> dict[str, Any]:
    """Returns the config.json and the shapes that `transformers` writes today."""
    import transformers

    name, fields = CASES[case]
    model = getattr(transformers, name)
    made = model(model.config_class(**fields))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made.save_pretrained(folder)
        stored = arrays.read_safetensors(folder / "model.safetensors")
        return {
            "config": json.loads((folder / "config.json").read_text()),
            "arrays": {name: list(array.shape) for name, array in stored.items()},
        }


if __name__ == "__main__":
    lines = [f'"{case}": {json.dumps(layout(case))}' for case in CASES]
    _LAYOUTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
