"""GGUF files: the same model as a folder of the hub, in another order."""

import json
import sys

import jax
import numpy as np
import pytest

from mha_haiku import interop
from mha_haiku.core import arrays, checks
from mha_haiku.interop import gguf_files
from mha_haiku.training.tasks import tokenization
from tests.interop import small_models

tokenizers = pytest.importorskip("tokenizers")
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
    assert found.config.replace(origin=wanted.config.origin) == wanted.config
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    assert found.tokenizer is None
    # It is saved as the folder of the hub that it could have been.
    saved = interop.save(tmp_path / "saved", found.config, found.params)
    again = interop.load(saved)
    assert again.config.replace(origin="") == found.config.replace(origin="")
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


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
        with pytest.raises(checks.ConfigError, match="truncated or cannot be read"):
            interop.load(file)


def test_missing_gguf_is_named(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(checks.ConfigError, match=r"pip install 'mha_haiku\[interop\]'"):
        interop.load(file)


@pytest.fixture
def load_with(folder, tmp_path, monkeypatch):
    """Loads the tiny Llama as a GGUF file with other fields; None leaves one out."""
    file = tmp_path / "model.gguf"
    _write(folder, file)
    stored, arrays_of = gguf_files.read(file)

    def load(change):
        fields = {k: v for k, v in (stored | change).items() if v is not None}
        monkeypatch.setattr(gguf_files, "read", lambda path: (fields, arrays_of))
        return interop.load(file)

    return load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length must be an integer"),
        ({"llama.attention.head_count": [6, 6]}, "llama.attention.head_count must be"),
        ({"llama.attention.head_count_kv": [3, 3]}, "llama.attention.head_count_kv mu"),
        ({"llama.block_count": None}, "llama.block_count must be an integer from 1"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "_rms_epsilon must be"),
        ({"tokenizer.ggml.tokens": None}, "is damaged.*it lacks 'tokens'"),
        ({"tokenizer.ggml.merges": None}, "is damaged.*it lacks 'merges'"),
        ({"tokenizer.ggml.bos_token_id": 9}, "is damaged.*index out of range"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "is damaged.*different texts"),
        ({"tokenizer.ggml.merges": ["ab"]}, "is damaged"),
        ({"tokenizer.ggml.token_type": [1] * 6}, "is damaged"),
        ({"tokenizer.ggml.bos_token_id": "5"}, "is damaged"),
    ],
)
def test_fields_without_which_there_is_no_model_are_named(load_with, change, message):
    with pytest.raises(checks.ConfigError, match=message):
        load_with(_TOKENS | {"tokenizer.ggml.add_bos_token": True} | change)


def test_what_llama_cpp_takes_for_fields_that_are_left_out(load_with):
    wanted = load_with({}).config
    found = load_with({"llama.rope.freq_base": None}).config
    assert found.replace(origin="") == wanted.replace(origin="")
    # Heads of D / H = 4, and as many of keys as of queries: of another model.
    for name in ("attention.key_length", "attention.head_count_kv"):
        with pytest.raises(checks.ConfigError, match=r"k_proj.* of shape|q_proj"):
            load_with({f"llama.{name}": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope.dimension_count", 4),
        ("attention.sliding_window", 4),
        ("logit_scale", 0.5),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 2.5),
        ("rope.scale_linear", 4.0),
        ("rope.scaling.attn_factor", 1.2),
        ("attention.causal", False),
        ("something.new", "x"),
    ],
)
def test_a_field_that_may_change_numbers_is_refused_by_name(load_with, name, value):
    with pytest.raises(checks.ConfigError, match=f"llama.{name} .*is not supported"):
        load_with({f"llama.{name}": value})


_TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*"abc12", "<s>", "</s>"],
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 3],
    "tokenizer.ggml.bos_token_id": 5,
    "tokenizer.ggml.eos_token_id": 6,
}


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        # What llama.cpp does where the file does not say it.
        ({"pre": "llama-bpe"}, (5,), ()),
        ({"pre": "smollm"}, (), ()),
        ({"pre": "llama-bpe", "add_bos_token": False}, (), ()),
        ({"pre": "qwen2", "add_eos_token": True}, (), (6,)),
        ({"pre": "llama-bpe", "add_eos_token": True}, (5,), (6,)),
        ({"pre": "llama-bpe", "bos_token_id": 3}, (3,), ()),
    ],
)
def test_special_tokens_are_put_where_llama_cpp_puts_them(fields, before, after):
    given = _TOKENS | {f"tokenizer.ggml.{name}": x for name, x in fields.items()}
    tokenizer = gguf_files.tokenizer("model.gguf", given)
    assert (tokenizer.before, tokenizer.after) == (before, after)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("qwen2", "a| b|??| |1|2|3|4|5|\n"),
        ("llama-bpe", "a| b|??| |123|45|\n"),
        ("smollm", "a| b|??| |1|2|3|4|5|\n"),
    ],
)
def test_texts_are_cut_as_llama_cpp_cuts_them(split, pieces):
    given = _TOKENS | {"tokenizer.ggml.pre": split}
    content = gguf_files.tokenizer("model.gguf", given).content
    cut = tokenizers.Tokenizer.from_str(content).pre_tokenizer.pre_tokenize_str
    found = [piece for piece, _ in cut("a b?? 12345\n")]
    assert "|".join(found).replace("\u0120", " ").replace("\u010a", "\n") == pieces


def test_tokens_are_those_of_the_merges(folder, tmp_path, caplog):
    trained = tokenization.train_byte_pairs(TEXT * 9, 270)._tokenizer
    content = json.loads(trained.to_str())["model"]
    ids = sorted(content["vocab"], key=content["vocab"].get)
    merges = [" ".join(pair) for pair in content["merges"]]
    fields = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": [*ids, "<|end|>"],
        "token_types": [*([1] * len(ids)), 3],
        "token_scores": [0.5] * (len(ids) + 1),
        "token_merges": merges,
        "bos_token_id": len(ids),
        "add_bos_token": True,
    }
    file = tmp_path / "model.gguf"
    # Its vocabulary is larger than the model's.
    _write(folder, file, **fields)
    assert interop.load(file).tokenizer.num_tokens == 31
    assert "tokenizer of 271 tokens, and a model of 31" in caplog.text
    stored, theirs = gguf_files.read(file)[0], gguf.GGUFReader(file).fields
    assert stored == {name: x.contents() for name, x in theirs.items()}
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
    whole = file.read_bytes()
    for name in (b"tokens", b"token_type", b"merges"):
        file.write_bytes(whole[: whole.index(b"ggml." + name) + 500])
        with pytest.raises(checks.ConfigError, match="truncated or cannot be read"):
            interop.load(file)
