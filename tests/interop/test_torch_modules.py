"""PyTorch modules as subjects, next to torch itself."""

import dataclasses
import inspect
import json
import sys
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mha_haiku as mh
from mha_haiku.core.checks import ConfigError
from mha_haiku.interop.torch_modules import conversion
from tests import everyday
from tests.interop.torch_packages import WARNINGS, torch, transformers

pytestmark = WARNINGS

from tests.interop import torch_families  # noqa: E402
from tests.interop.torch_families import CASES, B, D, H, S  # noqa: E402

HEAD = 1


def by_torch(model, given, **options):
    """Torch's results: logits or hidden states, and its whole output."""
    tensors = {name: torch.as_tensor(x) for name, x in given.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    with torch.no_grad():
        found = model(**tensors, **options)
    return found.get("logits", found[0]).numpy(), found


def close(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", everyday.some(CASES, 3))
def test_ablated_heads_are_those_of_torch(name):
    case = CASES[name]
    model, given = torch_families.make(case), case.inputs()
    whole, _ = by_torch(model, given)
    subject = mh.wrap(model, examples=[given], metric=lambda x, _: _squares(x))
    maps = subject.maps(given)

    def zero(module, inputs):
        heads = inputs[0].unflatten(-1, (maps[0].shape[-3], -1)).clone()
        heads[..., HEAD, :] = 0
        return heads.flatten(-2)

    model.get_submodule(case.projection).register_forward_pre_hook(zero)
    ablated, _ = by_torch(model, given)
    assert np.abs(ablated - whole).max() > 1e-3
    close(subject.ablated((0, HEAD)).logits(given), ablated)
    # All heads at once.
    slopes = subject.importance("gradient").mean
    assert slopes.shape == (len(maps), max(x.shape[-3] for x in maps))
    assert np.nanmax(np.abs(slopes)) > 0


def _squares(x):
    return (x**2).reshape(len(x), -1).mean(1)


class Layer(torch.nn.Module):
    """Attention only by torch, with options that a copy must not share."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 24), torch.nn.Dropout()])

    def forward(self, x, attention_mask=None):
        parts = self.blocks[0](x).chunk(3, -1)
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts
        )
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, None, None].bool()
        heads = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask
        )
        return self.blocks[1](heads.transpose(1, 2).flatten(-2))


class Model(torch.nn.Module):
    """Two layers in a list, and one in a dictionary."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.others = torch.nn.ModuleDict({"last": Layer()})

    def forward(self, x, attention_mask=None):
        for layer in (*self.layers, self.others["last"]):
            x = x + layer(x, attention_mask)
        return x


PATHS = ["layers_0", "layers_1", "others_last"]


def features(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.slow
def test_sites_are_named_after_modules_alone():
    found = mh.wrap(Model()).sites(features(B, S, 8))
    names = {name.rpartition("/")[0] for name in found}
    assert names == set(PATHS)
    found = mh.wrap(torch_families.make(CASES["t5"])).sites(CASES["t5"].inputs())
    assert [name for name in found if name.endswith("/weights")] == [
        *(f"encoder/block_{i}/layer_0/SelfAttention/weights" for i in range(2)),
        *(
            f"decoder/block_{i}/layer_{j}/{part}/weights"
            for i in range(2)
            for j, part in enumerate(("SelfAttention", "EncDecAttention"))
        ),
    ]


@pytest.mark.slow
def test_a_module_stays_as_it_is():
    module = Model().train()
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    subject = mh.wrap(module)
    x = features(B, S, 8)
    subject.maps(x)
    for name, part in module.named_modules():
        assert vars(part) == before[name]
    # In evaluation, whatever mode the module itself is in.
    close(subject.logits(x), module.eval()(torch.as_tensor(x)).detach())
    # Options of transformers are set only in the copy.
    module = torch_families.make(CASES["mixtral"])
    module.set_attn_implementation("sdpa")
    before = module.config.to_dict(), module.config._attn_implementation
    assert len(mh.wrap(module).maps(CASES["mixtral"].inputs())) == 2
    assert before == (module.config.to_dict(), module.config._attn_implementation)
    assert module.config._experts_implementation != "batched_mm"


class Function(torch.nn.Module):
    """A function of a module and of an embedding `[B, T, 8]` of tokens `[B, T]`."""

    def __init__(self, function):
        super().__init__()
        self.embed = torch.nn.Embedding(31, 8)
        self.function = function

    def forward(self, tokens):
        return self.function(self, self.embed(tokens))


def _like_torch(module):
    tokens = np.random.default_rng(0).integers(0, 31, (B, S))
    wanted = module.eval()(torch.as_tensor(tokens)).detach()
    close(mh.wrap(module).logits(tokens), wanted)


class Fields(NamedTuple):
    hidden: Any
    logits: Any


@dataclasses.dataclass
class Results:
    loss: Any
    logits: Any


OUTPUTS = {
    "mapping": lambda x: {"loss": None, "hidden": x + 1, "logits": x},
    "named tuple": lambda x: Fields(x + 1, x),
    "dataclass": lambda x: Results(x + 1, x),
    "dataclass without logits": lambda x: Results(x, None),
    "tuple": lambda x: (None, x, x + 1),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_logits_or_the_first_output_is_the_result(kind):
    module = Function(lambda _, x: OUTPUTS[kind](x))
    wanted = module.embed.weight.detach()[:S]
    close(mh.wrap(module).logits(np.arange(S)[None]), wanted[None])


SHARED = torch.ones(S, 8).cumsum(0)
CONSTANTS = {
    "ones": lambda x: torch.tril(torch.ones(S, S)) @ x,
    "full": lambda x: (torch.full((S, S), -torch.inf).triu(1)).softmax(-1) @ x,
    "mask": lambda x: x.masked_fill(torch.ones(S, 8, dtype=torch.bool).triu(1), 0),
    "indices": lambda x: x[:, torch.arange(S - 1, -1, -1, device="cpu")],
    "lists": lambda x: x * torch.tensor([1.0, 2] * 4) + torch.as_tensor([3] * 8),
    "numpy": lambda x: x * torch.from_numpy(np.tri(S, 8)).float(),
    "like": lambda x: x + x.new_tensor([1, 2] * 4),
    "one": lambda x: x * torch.sqrt(torch.tensor(8)) * int(torch.ones(S).sum()),
    "shared": lambda x: torch.cat([SHARED[None], x]),
    "cpu": lambda x: x.cpu() + torch.zeros(8).to("cpu"),
    "alone": lambda x: torch.zeros(B, S, 8).fill_(2),
}


@pytest.mark.slow
def test_tensors_made_without_a_device_are_constants():
    def each(_, x):
        return torch.cat([function(x) for function in CONSTANTS.values()])

    _like_torch(Function(each))
    half = Function(lambda _, x: x * torch.tensor(2.0)).bfloat16()
    assert mh.wrap(half).logits(np.ones((B, S), int)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "norm",
    [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.spectral_norm],
)
def test_parametrized_weights_are_computed_of_their_parameters(norm):
    module = Function(lambda module, x: module.inner(x)).eval()
    module.inner = norm(torch.nn.Linear(8, 8))
    before = {name: x.clone() for name, x in module.state_dict().items()}
    _like_torch(module)
    names = {name for name, _ in module.named_parameters()}
    names |= {name for name, _ in module.named_buffers()}
    assert names == mh.wrap(module).params.keys() - {"inner.weight"}
    chex.assert_trees_all_equal(before, dict(module.state_dict()))


class Anything(Function):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class ByPlace(Function):
    def forward(self, tokens, unused=None, /, *, factor=1):
        return super().forward(tokens) * factor


class Keywords(Function):
    def forward(self, **kwargs):
        return super().forward(kwargs["input_ids"])


@pytest.mark.parametrize("kind", [Anything, ByPlace, Keywords])
def test_inputs_are_passed_by_place_where_they_have_no_keyword(kind):
    module, tokens = kind(lambda _, x: x), np.ones((B, S), int)
    wanted = module.embed.weight.detach()[tokens]
    name = {Anything: "args", ByPlace: "tokens", Keywords: "input_ids"}[kind]
    for given in (tokens, {name: tokens}):
        close(mh.wrap(module).logits(given), wanted)
    if kind is ByPlace:
        given = {name: tokens, "factor": np.full(1, 3)}
        close(mh.wrap(module).logits(given), 3 * wanted)


def test_a_compiled_module_is_the_module():
    subject = mh.wrap(torch.compile(Model().eval(), backend="eager"))
    assert "Model of PyTorch" in repr(subject)
    assert subject.params.keys() == dict(Model().named_parameters()).keys()


def test_a_module_may_keep_what_it_computed():
    def function(module, x):
        module.weights = (x @ x.mT).softmax(-1)
        module.kept.append({"mean": (x.mean(),)})
        return module.weights @ x

    module = Function(function)
    module.kept = []
    module(torch.zeros(B, S, dtype=torch.int32))
    weights, kept = module.weights, module.kept[0]["mean"][0]
    copy = conversion._copied(module)
    assert copy.kept[0]["mean"][0].item() == kept.item()
    assert copy.embed.weight is module.embed.weight
    assert mh.wrap(module).sites(np.ones((B, S), int))
    assert module.weights is weights and weights.requires_grad
    assert [x["mean"][0] for x in module.kept] == [kept]
    _like_torch(module)


def test_what_is_computed_is_not_written_into_a_constant():
    def write(_, x, **options):
        rows = torch.zeros(B, S, 8, **options)
        rows[:, 1:] = x[:, 1:]
        return rows

    _like_torch(Function(lambda _, x: write(_, x, device=x.device)))
    for wrong in (write, lambda _, x: torch.add(x, 1, out=torch.zeros(B, S, 8))):
        with pytest.raises(TypeError, match="device of its inputs.*got aten"):
            mh.wrap(Function(wrong)).logits(np.ones((B, S), int))


@pytest.mark.slow
def test_lengths_become_the_mask_and_a_mask_of_padding_at_the_end_lengths():
    mask, x = np.arange(S) < np.array([[S], [3]]), features(B, S, 8)
    subject = mh.wrap(Model(), examples=[{"x": x, "attention_mask": mask}])
    (example,) = subject.batches
    assert example.lengths.tolist() == [S, 3] and not example.others
    close(subject.logits(example)[1, :3], subject.logits(x[1:, :3])[0])
    assert (subject.maps(example)["layers_0/map"].weights()[1, ..., 3:] == 0).all()
    with pytest.raises(ValueError, match="Linear takes no attention_mask"):
        mh.wrap(torch.nn.Linear(8, 8)).logits(example)
    # Another mask stays what it is.
    given = {"x": x, "attention_mask": mask[:, ::-1]}
    (example,) = mh.wrap(Model(), examples=[given]).batches
    assert example.lengths is None and list(example.others) == ["attention_mask"]
    assert (subject.maps(given)[0].weights()[1, ..., : S - 3] == 0).all()
    with pytest.raises(ValueError, match="inputs must have x, got y"):
        subject.maps({"y": x})


class Words:
    """A minimal tokenizer."""

    words = ("<s>", "</s>", *"abcdefgh")

    def encode(self, text):
        return [*map(self.words.index, text), 1]

    def decode(self, tokens):
        return "".join(self.words[token] for token in tokens)


@pytest.fixture(scope="module")
def translating():
    model = torch_families.make(CASES["t5"])
    return mh.wrap(model, tokenizer=Words(), examples=[(["abc", "cb"], ["de", "fgh"])])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_answers_as_in_torch(name):
    model = torch_families.make(CASES[name])
    model.generation_config.decoder_start_token_id = start = 2
    model.config.decoder_start_token_id = start
    words = Words()
    words.words = [chr(97 + i) for i in range(torch_families.VOCABULARY)]
    inputs, written = torch.tensor([words.encode("cde")]), [start]
    for _ in range(4):
        with torch.no_grad():
            logits = model(inputs, decoder_input_ids=torch.tensor([written])).logits
        written.append(int(logits[0, -1].argmax()))
    assert 1 not in written  # which would end it
    answer = mh.wrap(model, tokenizer=words, check=False).generate("cde", tokens=4)
    assert answer == words.decode(written[1:])


@pytest.mark.slow
def test_pair_of_texts_is_a_source_and_what_a_decoder_writes(translating):
    (batch,) = translating.batches
    assert batch.inputs.tolist() == [[2, 3, 4, 1], [4, 3, 1, 0]]
    assert batch.lengths.tolist() == [4, 3]
    assert batch.decoder_inputs.tolist() == [[0, 5, 6, 1], [0, 7, 8, 9]]
    assert batch.targets.tolist() == [[5, 6, 1, 0], [7, 8, 9, 1]]
    assert batch.weights.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    given = {
        "input_ids": batch.inputs[:1],
        "decoder_input_ids": batch.decoder_inputs[:1, :3],
    }
    close(translating.logits(("abc", "de")), translating.logits(given)[0])
    close(translating.logits(batch)[0, :3], translating.logits(given)[0])
    for wrong in ("abc", ["abc", "de"], ("abc", ["de", "f"])):
        with pytest.raises(ValueError, match="source"):
            translating.logits(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bert", "gpt2"])
def test_loss_of_labels_is_that_of_torch(name):
    model, none = torch_families.make(CASES[name]), -100
    tokens = CASES[name].inputs()["input_ids"]
    count = 5 if name == "t5" else S
    labels = np.random.default_rng(1).integers(3, 31, (B, count))
    labels[0, :2], labels[1, 3:] = none, none
    given = {"input_ids": tokens, "labels": labels}
    wanted = []
    for i in range(B):
        row = {name: torch.as_tensor(x[i : i + 1]) for name, x in given.items()}
        wanted.append(model(**row).loss.item())
    subject = mh.wrap(model, examples=given)
    for examples in (B, given):
        measured = subject.measured(examples)
        (batch,) = measured.batches
        close(measured.metric(subject.logits(batch), batch), wanted)
    with pytest.raises(ValueError, match="has examples without targets"):
        subject.measured(given | {"labels": np.full_like(labels, none)})


@pytest.mark.slow
def test_labels_of_whole_texts_and_of_decoders_that_were_cut_out_are_not_shifted():
    config = dict(vocab_size=31, d_model=8, decoder_layers=1, decoder_ffn_dim=8)
    config = transformers.BartConfig(**config, decoder_attention_heads=2)
    decoder = transformers.BartForCausalLM(config)
    case = CASES["bert"]
    config = transformers.BertConfig(**case.sizes, num_labels=3)
    classifier = transformers.BertForSequenceClassification(config)
    tokens = case.inputs()["input_ids"][:1]
    for model, labels in ((decoder, tokens[:, ::-1].copy()), (classifier, [2])):
        given = {"input_ids": tokens, "labels": np.array(labels)}
        subject = mh.wrap(model.eval(), examples=given)
        measured = subject.measured(1)
        (batch,) = measured.batches
        _, wanted = by_torch(model, given)
        close(measured.metric(subject.logits(batch), batch), [wanted.loss.item()])


@pytest.mark.slow
def test_encoder_decoder_and_cross_attention_are_kinds(translating):
    found = translating.maps(("abc", "de"))
    shapes = [x.shape[-2:] for x in found]
    assert shapes == [(4, 4)] * 2 + [(3, 3)] * 2 + [(3, 4)] * 2
    assert found.tokens == (("<s>", "d", "e"),)
    assert found.key_tokens == (("a", "b", "c", "</s>"),)
    page = found.show()
    assert "cross block_1" in page._repr_html_()
    assert [layer.name for layer in translating.roles().layers] == [
        f"{kind} {i}" for kind in ("encoder", "decoder", "cross") for i in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "most"), [("gpt2", 16), ("roberta", 14), ("gptj", 16), ("bart", 16)]
)
def test_positions_and_tokens_that_torch_refuses_are_refused(name, most):
    model, given = torch_families.make(CASES[name]), CASES[name].inputs()
    subject = mh.wrap(model)
    longest, beyond, low = np.full((B, most), 3), np.full((B, 4), 31), [[3, -1]] * B
    assert subject.sites(given | {"input_ids": longest})
    for wrong, message in (
        (np.full((B, most + 1), 3), f"inputs must be of at most {most} tokens"),
        (beyond, r"inputs must be integers from 0 to 30, got 31 at \[0, 0\]"),
        (np.array(low), r"inputs must be integers from 0 to 30, got -1 at \[0, 1\]"),
    ):
        wrong = given | {"input_ids": wrong}
        with pytest.raises((IndexError, RuntimeError)):
            by_torch(model, wrong)
        with pytest.raises(ValueError, match=message):
            subject.logits(wrong)
    if name == "bart":
        wrong = given | {"decoder_input_ids": beyond}
        with pytest.raises(ValueError, match="decoder_inputs must be .* got 31"):
            subject.logits(wrong)


@pytest.mark.slow
def test_a_module_writes_as_torch_does_up_to_its_last_position():
    model = torch_families.make(CASES["gpt2"])
    words = Words()
    words.words = [chr(ord("a") + i) for i in range(31)]
    subject, prompt = mh.wrap(model, tokenizer=words), "hell"
    rows = torch.as_tensor([words.encode(prompt)])
    for _ in range(11):  # of 16 positions
        logits, _ = by_torch(model, {"input_ids": rows})
        best = torch.as_tensor(logits[:, -1:].argmax(-1))
        rows = torch.cat([rows, best], -1)
    wanted = words.decode(rows[0, 5:].tolist())
    assert len(set(wanted)) > 1
    assert subject.generate(prompt, temperature=0) == wanted
    for text, tokens, message in (
        (prompt, 12, "tokens after a prompt of 5 must be .* from 1 to 11, got 12"),
        ("a" * 15, 1, "prompt must be of fewer tokens than the 16 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.generate(text, tokens=tokens, temperature=0)


@pytest.mark.slow
def test_features_go_where_a_model_takes_them_and_rotary_positions_have_no_end():
    model = torch_families.make(CASES["llama"])
    tokens = np.arange(20)[None] % 7
    assert model.config.max_position_embeddings == 16
    embedded = model.get_input_embeddings()(torch.as_tensor(tokens)).detach().numpy()
    subject = mh.wrap(model)
    close(subject.logits(tokens), by_torch(model, {"input_ids": tokens})[0])
    close(subject.logits(embedded), subject.logits(tokens))


@pytest.mark.slow
def test_folder_of_a_family_without_a_table_is_loaded_by_transformers(tmp_path):
    case = CASES["whisper"]
    model = torch_families.make(case)
    model.save_pretrained(tmp_path)
    subject = mh.load(tmp_path)
    assert f"{case.model} of PyTorch" in repr(subject)
    inputs = case.inputs()
    close(subject.logits(inputs), by_torch(model, inputs)[0])
    source, target = inputs["input_features"], inputs["decoder_input_ids"]
    assert subject.logits((source, target)).shape[:2] == target.shape
    with pytest.raises(ValueError, match="step must be None"):
        mh.load(tmp_path, step=3)


@pytest.mark.slow
def test_texts_are_read_by_the_tokenizer_of_transformers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs mha_haiku[data]")
    words = ["[UNK]", "</s>", "the", "cat", "sat"]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="</s>"
    )
    torch_model = torch_families.make(CASES["gptj"])
    torch_model.save_pretrained(tmp_path)
    whole.save_pretrained(tmp_path)
    texts = ["the cat sat", "the dog"]
    for subject in (mh.wrap(torch_model, tokenizer=whole), mh.load(tmp_path)):
        maps = subject.maps(texts[0])
        assert maps.tokens == (("the", "cat", "sat"),)
        assert maps[0].shape == (1, H, 3, 3)
        # What the tokenizer itself makes of several texts, padding and mask included.
        given = whole(texts, padding=True, return_tensors="pt")
        wanted, _ = by_torch(torch_model, given)
        close(subject.logits(texts)[1, :2], wanted[1, :2])
        close(subject.logits(given)[1, :2], wanted[1, :2])


@pytest.fixture
def gptj(tmp_path):
    """A function that changes the saved GPT-J: its arrays, its config.json."""
    torch_families.make(CASES["gptj"]).save_pretrained(tmp_path)

    def change(arrays_of=lambda arrays: None, **config):
        weights, file = tmp_path / "model.safetensors", tmp_path / "config.json"
        arrays = safetensors.numpy.load_file(weights)
        arrays_of(arrays)
        safetensors.numpy.save_file(arrays, weights, metadata={"format": "pt"})
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return tmp_path

    return change


def test_refusals_of_folders(gptj, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"\[torch\]"):
        patch.setitem(sys.modules, "transformers", None)
        mh.load(gptj())
    with pytest.raises(ConfigError, match="could not be read by transformers"):
        mh.load(gptj(n_layer="x"))
    with pytest.raises(ConfigError, match="gptj5.*\n?.*Nor does transformers"):
        mh.load(gptj(model_type="gptj5"))


_QUERY = "transformer.h.0.attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(_QUERY), f"\nit lacks {_QUERY}"),
        (lambda x: x.pop("lm_head.bias"), "\nit lacks lm_head.bias"),
        (
            lambda x: x.update({_QUERY: np.ones((D, D - 1), "f4")}),
            rf"{_QUERY} of shape \(24, 23\); the model .* needs \(24, 24\)",
        ),
        (
            lambda x: x.update({"transformer.h.0.attn.q_norm.weight": np.ones(D)}),
            "\nit also has transformer.h.0.attn.q_norm.weight",
        ),
        (  # of a deeper model
            lambda x: x.update({"transformer.h.2.ln_1.bias": np.ones(D)}),
            "\nit also has transformer.h.2.ln_1.bias",
        ),
    ],
)
def test_arrays_that_do_not_fit_a_model_of_transformers_are_named(
    gptj, change, message
):
    folder = gptj(change)
    with pytest.raises(ConfigError, match=message) as caught:
        mh.load(folder)
    assert str(caught.value).count("\n") < 2


def test_arrays_of_other_heads_and_constants_are_left_out(gptj, caplog):
    wanted = mh.load(gptj()).params
    extra = {"score.weight": np.ones(D), "transformer.h.0.attn.bias": np.ones(3, bool)}
    found = mh.load(gptj(lambda x: x.update(extra))).params
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert "GPTJForCausalLM leaves out score.weight." in caplog.text


@pytest.mark.parametrize(
    "names",
    [
        None,
        [],
        [5],
        *([x] for x in ("My", "AutoModel", "GPT2LMHeadModel", "GPTJConfig")),
    ],
)
def test_a_class_that_is_none_of_the_model_is_refused(gptj, names):
    folder = gptj(architectures=names)
    wanted = "architectures must be one of .*GPTJForCausalLM, .*; got"
    with pytest.raises(ConfigError, match=wanted):
        mh.load(folder)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_config_loads_no_code_from_the_hub(gptj, name, monkeypatch):
    from transformers import modeling_utils

    def fail(*_, **options):
        raise AssertionError("code is loaded")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", fail)
    subject = mh.load(gptj(**{name: "owner/name"}))
    assert subject.logits(CASES["gptj"].inputs()).shape == (B, S, 31)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 5}}'),
        ("tokenizer_config.json", '{"tokenizer_class": ["x"]}'),
    ],
)
def test_a_damaged_tokenizer_is_one_error(gptj, name, text):
    folder = gptj()
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="the tokenizer in .* is damaged") as caught:
        mh.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_pixels_and_sound_have_patches_and_seconds_along_their_maps():
    """Patches behind the mark of the class; frames of 10 ms, halved by Whisper."""
    pixels = np.array(CASES["vit"].inputs()["pixel_values"])
    pixels[..., pixels.shape[-1] // 2 :] = 1 + pixels.max()
    maps = mh.wrap(torch_families.make(CASES["vit"])).maps({"pixel_values": pixels})
    side = round((maps[0].shape[-1] - 1) ** 0.5)
    places = [f"{i},{j}" for i in range(side) for j in range(side)]
    assert maps.tokens == (("[0]", *places),) * len(pixels)
    at_the_right = [x.endswith(f",{side - 1}") for x in maps.tokens[0]]
    pictures = maps.images[0]
    assert pictures[at_the_right].min() == 255 and pictures[0].max() == 0
    assert "0,1" in maps.show().html and maps.plot() is not None
    given = CASES["whisper"].inputs()
    heard = mh.wrap(torch_families.make(CASES["whisper"])).maps(given)
    assert heard.key_tokens[0][:3] == ("0.00s", "0.02s", "0.04s")
    assert len(heard.key_tokens[0]) == given["input_features"].shape[-1] // 2
    assert heard.show().html


def test_a_module_knows_each_end_token_of_its_folder(gptj):
    folder = gptj()
    contents = json.dumps({"eos_token_id": [3, 5]})
    (folder / "generation_config.json").write_text(contents)
    assert mh.load(folder).codec.end_tokens == (3, 5)
