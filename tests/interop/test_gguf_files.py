"""GGUF files: the same model as a folder of the hub, in another order."""

import json
import struct

import jax
import numpy as np
import pytest

from mha_haiku import interop
from mha_haiku.core import arrays, checks
from mha_haiku.interop import gguf_files
from mha_haiku.training.tasks import tokenization
from tests.interop import small_models

gguf = pytest.importorskip("gguf", reason="GGUF files need mha_haiku[interop]")

TEXT = "Numbers 1234 and words, \u00e9 too."


def _in_pairs(x, num_heads):
    """Rows of each head so that those half a head apart lie side by side."""
    by_heads = x.reshape(num_heads, 2, -1, x.shape[-1])
    return np.concatenate(
        [pair for head in by_heads for pair in head.transpose(1, 0, 2)]
    )


def _write(folder, file, kinds=lambda name: "F32", **fields):
    """Writes the tiny model of a folder as GGUF, under the names that gguf gives."""
    config = json.loads((folder / "config.json").read_text())
    kind_of_model = config["model_type"]
    architecture = getattr(gguf.MODEL_ARCH, kind_of_model.upper())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, kind_of_model)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    stored = arrays.read_safetensors(folder / "model.safetensors")
    for name, array in stored.items():
        x = array.read()
        if kind_of_model == "llama" and ("q_proj" in name or "k_proj" in name):
            x = _in_pairs(x, x.shape[0] // config["head_dim"])
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = getattr(gguf.GGMLQuantizationType, kinds(name))
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama").mkdir()
    return small_models.write(tmp_path / "llama", "llama")


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_model_of_its_folder(case, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    small_models.write(folder, case)
    _write(folder, tmp_path / "model.gguf")
    found, wanted = interop.load(tmp_path / "model.gguf"), interop.load(folder)
    assert found.config.to_json() == wanted.config.to_json()
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    assert found.tokenizer is None


def test_halves_are_read_and_damage_is_refused(folder, tmp_path):
    file = tmp_path / "model.gguf"
    _write(folder, file, lambda name: "F32" if "norm" in name else "F16")
    found, wanted = interop.load(file), interop.load(folder)

    def compare(x, y):
        y = y if y.ndim == 1 else y.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(compare, found.params, wanted.params)
    whole = file.read_bytes()
    for size in (3, 40, 700, len(whole) - 40):
        file.write_bytes(whole[:size])
        with pytest.raises(checks.ConfigError, match="cut off or no GGUF"):
            interop.load(file)


_UINT32, _TEXT, _LIST, _INT32, _FLOAT32 = 4, 8, 9, 5, 6  # types of fields


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<II", _UINT32, 0),
        struct.pack("<Ii", _INT32, -8),
        struct.pack("<If", _FLOAT32, 1.5),
        struct.pack("<IQ3s", _TEXT, 3, b"abc"),
        struct.pack("<I", _LIST)
        + struct.pack("<IQ", _LIST, 1) * 3000
        + struct.pack("<IQ", _UINT32, 0),
        struct.pack("<I", 99),
    ],
    ids=["0", "-8", "1.5", "text", "nested", "unknown type"],
)
def test_an_alignment_that_is_none_is_damage(value, tmp_path):
    name = b"general.alignment"
    header = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name + value
    (tmp_path / "model.gguf").write_bytes(header)
    with pytest.raises(checks.ConfigError, match="is damaged"):
        interop.load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"rope_dimension_count": 4}, "llama.rope.dimension_count = 4 is not supp"),
        ({"sliding_window": 4}, "llama.attention.sliding_window = 4 is not supp"),
        ({"logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        (
            {"rope_scaling_type": gguf.RopeScalingType.YARN},
            "llama.rope.scaling.type = 'yarn' is not supported",
        ),
    ],
)
def test_options_that_are_not_supported_are_refused(folder, tmp_path, fields, message):
    _write(folder, tmp_path / "model.gguf", **fields)
    with pytest.raises(checks.ConfigError, match=message):
        interop.load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length must be an integer"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be"),
        ({"llama.attention.head_count": [6, 6]}, "llama.attention.head_count must be"),
        ({"llama.attention.head_count_kv": [3, 3]}, "num_key_value_heads must be"),
        ({"llama.block_count": None}, "config.json must have 'num_hidden_layers'"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.bos_token_id": 9}, "bos_token_id must be an .* 0 to 1, got"),
    ],
)
def test_fields_without_which_there_is_no_model_are_named(
    folder, tmp_path, monkeypatch, change, message
):
    file = tmp_path / "model.gguf"
    _write(folder, file)
    fields, stored = arrays.read_gguf(file)
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 1,
    }
    fields = {k: v for k, v in (fields | change).items() if v is not None}
    monkeypatch.setattr(arrays, "read_gguf", lambda path: (fields, stored))
    with pytest.raises(checks.ConfigError, match=message):
        interop.load(file)


def test_tokens_are_those_of_the_merges(folder, tmp_path, caplog):
    trained = tokenization.BytePairs.train(TEXT * 9, 270).tokenizer
    content = json.loads(trained.to_str())["model"]
    ids = sorted(content["vocab"], key=content["vocab"].get)
    merges = [" ".join(pair) for pair in content["merges"]]
    fields = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": [*ids, "<|end|>"],
        "token_types": [*([1] * len(ids)), 3],
        "token_merges": merges,
        "bos_token_id": len(ids),
        "add_bos_token": True,
    }
    file = tmp_path / "model.gguf"
    # Its vocabulary is larger than the model's: it belongs to another model.
    _write(folder, file, **fields)
    with pytest.raises(
        checks.ConfigError, match="tokenizer of 271 tokens, and a model"
    ):
        interop.load(file)

    stored = arrays.read_gguf(file)[0]
    tokenizer = gguf_files.tokenizer(file, stored, 300)
    assert tokenizer.num_tokens == 300 and tokenizer.before == (len(ids),)
    assert tokenizer.label(len(ids)) == "<|end|>"
    tokens = tokenizer.encode(TEXT + "<|end|>").tolist()
    labels = [tokenizer.label(token) for token in tokens]
    assert labels[-1] == "<|end|>"
    assert [x for x in labels if x.isdigit()] == list("1234")  # each on its own
    # Of a kind that is not read, the model comes without one, and says so.
    _write(folder, file, **{**fields, "tokenizer_pre": "tekken"})
    assert interop.load(file).tokenizer is None
    assert "kind 'gpt2', 'tekken', which is not read" in caplog.text
