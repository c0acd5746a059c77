"""Where models come from, and what is refused: by name, in at most two lines."""

import json
import sys
import types

import jax
import numpy as np
import pytest

from mha_haiku import interop
from mha_haiku.core import arrays, checks
from mha_haiku.interop import sources
from tests import pretrained
from tests.interop import small_models


@pytest.fixture
def folder(tmp_path):
    """A tiny GPT-2 in the layout of the hub."""
    (tmp_path / "gpt").mkdir()
    return small_models.write(tmp_path / "gpt", "gpt2")


def _set(folder, **fields):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **fields}))


def _rewrite(folder, change):
    """Writes the arrays again, after `change` of the dict of them."""
    file = folder / "model.safetensors"
    found = {n: np.array(x.read()) for n, x in arrays.read_safetensors(file).items()}
    change(found)
    arrays.write_safetensors(file, found)


def _refused(source, message):
    with pytest.raises(checks.ConfigError, match=message) as caught:
        interop.load(source)
    assert str(caught.value).count("\n") < 2


def _same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


def test_folder_file_shards_and_package_give_the_same(folder, tmp_path, monkeypatch):
    wanted = interop.load(folder)
    _same(interop.load(str(folder / "model.safetensors")), wanted)
    # An installed package: its files lie next to its code, which is not run.
    package = tmp_path / "site" / "some_model"
    package.mkdir(parents=True)
    about = tmp_path / "site" / "some_model-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: some-model\nVersion: 1.0\n")
    names = ("config.json", "model.safetensors")
    (about / "RECORD").write_text("".join(f"some_model/{name},,\n" for name in names))
    (package / "__init__.py").write_text("raise RuntimeError('was run')")
    for name in names:
        (package / name).write_bytes((folder / name).read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ValueError, match="dtype must be .* got int32"):
        interop.load(folder, dtype="int32")
    _same(interop.load("package:some-model"), wanted)
    assert "some_model" not in sys.modules
    # In two files with an index.
    stored = arrays.read_safetensors(folder / "model.safetensors")
    names = sorted(stored)
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(file_of.values()):
        own = {n: stored[n].read() for n in names if file_of[n] == file}
        arrays.write_safetensors(folder / file, own)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": file_of}))
    _same(interop.load(folder), wanted)
    (folder / "part-1.safetensors").unlink()
    _refused(folder, r"names 'part-1.safetensors', which does not exist")


def test_shards_lie_in_the_folder_of_their_index_or_below(tmp_path):
    folder, index = tmp_path / "model", tmp_path / "model" / "model.index.json"
    files = {"a": "one.safetensors", "b": "in/one.safetensors", "c": "./in/c/../..two"}
    (folder / "in" / "c").mkdir(parents=True)
    for value, (name, file) in enumerate(files.items()):
        arrays.write_safetensors(folder / file, {name: np.full(3, value, "f4")})
    index.write_text(json.dumps({"weight_map": files}))
    for value, (name, stored) in enumerate(sorted(arrays.read_shards(index).items())):
        assert name == "abc"[value]
        np.testing.assert_array_equal(stored.read(), np.full(3, value))


def test_older_names_and_buffers_are_known(folder):
    wanted = interop.load(folder)

    def change(found):
        for name in list(found):
            found[name.removeprefix("transformer.")] = found.pop(name)
        found["h.0.attn.bias"] = np.ones((1, 1, 14, 14), bool)
        found["h.1.attn.masked_bias"] = np.float32(-1e4)

    _rewrite(folder, change)
    _same(interop.load(folder), wanted)


def test_norms_of_older_files_have_their_names_once(tmp_path):
    wanted = interop.load(small_models.write(tmp_path, "bert"))
    older, newer = (f"bert.embeddings.LayerNorm.{x}" for x in ("gamma", "weight"))
    _rewrite(tmp_path, lambda found: found.update({older: found.pop(newer)}))
    _same(interop.load(tmp_path), wanted)
    _rewrite(tmp_path, lambda found: found.update({newer: found[older]}))
    _refused(tmp_path, f"has {newer} under two names")


def test_what_a_head_does_not_read_is_left_out_aloud(tmp_path, caplog):
    wanted = interop.load(small_models.write(tmp_path, "bert"))
    assert not caplog.records
    pooler = {"bert.pooler.dense.weight": np.ones((24, 24), np.float32)}
    _rewrite(tmp_path, lambda found: found.update(pooler))
    _same(interop.load(tmp_path), wanted)
    assert "BertForMaskedLM leaves out bert.pooler.dense.weight." in caplog.text


def test_a_token_that_the_model_has_no_row_for_refuses_texts_with_it(folder, caplog):
    tokenizer = pretrained.words()
    missing = 31 - tokenizer.get_vocab_size()
    for count in (missing, missing + 1):
        tokenizer.add_tokens([f"more{i}" for i in range(count)])
        tokenizer.save(str(folder / "tokenizer.json"))
        loaded = interop.load(folder).tokenizer
        assert loaded.num_tokens == 31
        assert ("tokenizer of 32 tokens" in caplog.text) == (count > missing)
    assert loaded.encode(f"the cat more{missing - 1}").tolist()[-1] == 30
    with pytest.raises(checks.ConfigError, match=f"it needs 'more{missing}', .* 31"):
        loaded.encode(f"the cat more{missing}")


def test_copies_of_tied_arrays_are_left_out(folder):
    wanted = interop.load(folder)

    def add(found):
        found["lm_head.weight"] = np.array(found["transformer.wte.weight"])

    _rewrite(folder, add)
    _same(interop.load(folder), wanted)
    _rewrite(folder, lambda found: found["lm_head.weight"].fill(1))
    # Untied, it is a separate array.
    _set(folder, tie_word_embeddings=False)
    untied = interop.load(folder)
    np.testing.assert_array_equal(untied.params["logits"]["w"], np.ones((24, 31)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop("transformer.h.1.ln_2.bias"),
            "\nit lacks transformer.h.1.ln_2.bias",
        ),
        (
            lambda x: x.update({"transformer.h.0.q.weight": np.ones(2)}),
            "\nit also has transformer.h.0.q.weight",
        ),
        (
            lambda x: x.update({"transformer.wpe.weight": np.ones((13, 24))}),
            r"transformer.wpe.weight of shape \(13, 24\), .* fit the \(14, 24\) that",
        ),
        (
            lambda x: x.update(
                {"transformer.h.1.attn.c_attn.weight": np.ones((72, 24))}
            ),
            r"h.1.attn.c_attn.weight of shape \(72, 24\), which does not fit",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(folder, change, message):
    _rewrite(folder, change)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt3"}, "model_type.* must be one of bert, .* got 'gpt3'"),
        ({"architectures": ["GPT2LMHedModel"]}, "Did you mean 'GPT2LMHeadModel'"),
        ({"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* not supp"),
        ({"activation_function": "mish"}, "activation_function must be one of gelu"),
        *(
            ({"architectures": value}, "architectures must be")
            for value in (5, {"a": 1}, [5], [["a"]], [None], None, [])
        ),
        ({"n_head": 5}, "must divide model_size"),
    ],
)
def test_configs_that_would_change_numbers_are_refused(folder, fields, message):
    _set(folder, **fields)
    _refused(folder, message)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("gpt2", {"n_embd": 100_000, "n_head": 100_000}, "does not fit"),
        ("bert_classes", {"num_labels": 2**31 - 1}, "does not fit"),
    ],
)
def test_sizes_beyond_the_arrays_are_refused_at_once(case, fields, message, tmp_path):
    small_models.write(tmp_path, case)
    _set(tmp_path, **fields)
    _refused(tmp_path, message)


def test_sizes_of_our_own_layout_are_checked_first(folder, tmp_path):
    whole = interop.load(folder)
    interop.save(tmp_path / "own", whole.config, whole.params, own_layout=True)
    file = tmp_path / "own" / "config.json"
    stored = json.loads(file.read_text())
    sizes, model = stored["sizes"], stored["model"]
    for change, message in (
        ({"model": {**model, "norm.epsilon": 10**400}}, "epsilon must be a finite num"),
        ({"model": {"a": 1, "a.b": 2}}, "a of a.b has both a value and fields"),
        ({"model": 5}, "lacks sizes or a model"),
        ({"sizes": {"num_tokens": 31}}, "lacks sizes or a model"),
        ({"sizes": {**sizes, "feature_size": 5}}, "must have num_tokens or feature"),
        ({"sizes": {**sizes, "num_tokens": "x"}}, "num_tokens must be an integer"),
        ({"sizes": {**sizes, "num_tokens": 2**31 - 1}}, "does not fit"),
    ):
        file.write_text(json.dumps({**stored, **change}))
        _refused(tmp_path / "own", message)


def test_files_of_another_size_are_damaged(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", *(whole[:x] for x in (5, 100, -1)), whole + b"\0"):
        file.write_bytes(content)
        _refused(folder, "is damaged, cut off or not a safetensors file")


def test_places_without_a_model_are_refused(folder, tmp_path, monkeypatch):
    _refused(tmp_path / "gtp", "does not exist. Did you mean 'gpt'")
    _refused("/dev/null", "source must be a folder, a .safetensors or a .gguf file")
    _refused("package:jax", "package 'jax' has no model")
    _refused("package:numpy", "package 'numpy' has no model")  # but pickled data
    _refused("package:jaxx", "no installed package 'jaxx'. Did you mean 'jax'")
    (folder / "config.json").rename(folder / "other.json")
    _refused(folder, "no config.json.*it has model.safetensors, other.json")
    _refused(folder / "other.json", "a .safetensors or a .gguf file")
    (folder / "other.json").rename(folder / "config.json")
    (folder / "model.safetensors").unlink()
    _refused(folder, "no model.safetensors; it has config.json")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    _refused(folder, "pytorch_model.bin: pickled weights are not read, as opening")
    _refused(folder / "pytorch_model.bin", "pickled weights are not read")
    (folder / "config.json").write_text("{")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    _refused(folder, "cut off or not a safetensors file")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    _refused("somebody/model", "needs huggingface_hub: pip install")


def test_names_on_the_hub_are_fetched_without_pickled_files(
    folder, monkeypatch, capsys
):
    hub = pytest.importorskip("huggingface_hub")

    def fetch(name, allow_patterns):
        assert name == "somebody/model" and "model*.safetensors" in allow_patterns
        assert not any("*.bin" in each or each == "*" for each in allow_patterns)
        return str(folder)

    def fail(*_, **__):
        raise OSError("no network\nhere")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    _same(interop.load("somebody/model"), interop.load(folder))
    of_id = {"model": types.SimpleNamespace(id="somebody/model")}
    monkeypatch.setattr(hub, "model_info", of_id.__getitem__)
    _same(interop.load("model"), interop.load(folder))  # as gpt2 and other old names
    assert capsys.readouterr().out == "model is somebody/model on the hub.\n"
    monkeypatch.setattr(hub, "snapshot_download", fail)
    message = "could not be fetched from the hub.\nOSError: no network"
    for name in "somebody/model", "TinyLlama/TinyLlama-1.1B-v1.0":
        _refused(name, message)
    monkeypatch.setattr(hub, "model_info", fail)
    monkeypatch.chdir(folder.parent)
    _refused("gtp", "could not be fetched from the hub. Did you mean 'gpt'")


@pytest.mark.parametrize(
    ("card", "name", "title"),
    [
        (b"---\nlanguage: en\n---\n\n# Small-v2\nText.", "model", "Small-v2"),
        (b"# A model of sentences\n", "model", "model"),
        (b"caf\xe9\r\n# Small\r\n", "model", "Small"),
        (None, "Small-2B.Q4_1.gguf", "Small-2B.Q4_1"),
    ],
)
def test_a_source_has_the_name_of_its_card_or_of_its_place(tmp_path, card, name, title):
    folder = tmp_path / name
    folder.mkdir()
    if card is not None:
        (folder / "README.md").write_bytes(card)
    assert sources.Source(str(folder), {}, {}, lambda rows: None, folder).title == title
