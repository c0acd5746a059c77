"""Maps of a PyTorch model's own run, next to its `output_attentions`."""

import numpy as np
import pytest

import mha_haiku as mh

WHY = "needs mha_haiku[torch]: torch, torchax and transformers"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

from tests.interop import torch_families  # noqa: E402
from tests.interop.torch_families import CASES, B, S  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # theirs
PADDING = 3  # at the left of the last example
FAMILIES = "bart bert clip gemma2 gpt2 gpt_oss llama mixtral t5 vit whisper".split()


def make(name, attention=None):
    model = torch_families.make(CASES[name])
    if attention is None:
        attention = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(attention)
    given = {k: torch.as_tensor(x) for k, x in CASES[name].inputs().items()}
    if "input_ids" in given and "decoder_input_ids" not in given and name != "clip":
        given["attention_mask"] = torch.ones(B, S, dtype=int)
        given["attention_mask"][-1, :PADDING] = 0
    return model, given


def weights_by_torch(model, given):
    """By kind: encoder's, decoder's or the model's own, cross."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(**given, output_attentions=True)
    sides = [found.get("vision_model_output"), found.get("text_model_output"), found]
    names = "encoder_attentions", "attentions", "decoder_attentions", "cross_attentions"
    return [x for side in sides if side for n in names for x in side.get(n) or ()]


def in_order_of_torch(maps):
    """Encoder, decoder, cross-attention."""
    names = sorted(
        maps.names,
        key=lambda x: ("decoder" in x, "encoder_attn" in x or "EncDec" in x),
    )
    return [maps[name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_those_that_the_model_returns(name):
    model, given = make(name)
    with torch.no_grad(), mh.record(model) as maps:
        model(**given)
    (found,) = maps
    for map_, weights in zip(
        in_order_of_torch(found), weights_by_torch(model, given), strict=True
    ):
        # A row that sees nothing is 0 here and in kernels, and uniform in eager.
        sees = np.asarray(map_.sees)[..., None]
        assert sees.mean() > 0.7
        np.testing.assert_allclose(
            map_.weights(), np.where(sees, weights.numpy(), 0), atol=2e-6
        )
    if name != "clip":  # of two sizes
        assert found.show().html and found.plot() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "t5", "gemma2", "gpt_oss"]
)
def test_each_token_that_is_written_has_its_row(name):
    """The rows of a text that is read at once are the queries of the calls."""
    model, given = make(name)
    if name == "gpt2":  # whose positions begin at the first token
        given["attention_mask"] = torch.ones(B, S, dtype=int)
    with mh.record(model) as maps:
        tokens = model.generate(
            **given, max_new_tokens=4, do_sample=False, min_new_tokens=4, pad_token_id=0
        )
    assert len(maps) == 4
    if "decoder_input_ids" in given:
        given["decoder_input_ids"] = tokens[:, :-1]
    else:
        given["input_ids"] = tokens[:, :-1]
        given["attention_mask"] = torch.nn.functional.pad(
            given["attention_mask"], (0, 3), value=1
        )
    with torch.no_grad(), mh.record(model) as whole:
        model(**given)
    for path in maps[-1].names:
        first, last = maps[0][path], maps[-1][path]
        expected = np.asarray(whole[0][path].weights())
        length, num_keys = last.shape[-2:]
        assert length == 1
        mine = np.asarray(last.weights())
        np.testing.assert_allclose(mine, expected[:, :, -1:, -num_keys:], atol=1e-5)
        rows = first.shape[-2]
        mine = np.asarray(first.weights())
        expected = expected[:, :, :rows, : first.shape[-1]]
        np.testing.assert_allclose(mine, expected, atol=1e-5)
        assert last.weighting.origin.query in (0, rows + 2)


def test_a_text_that_is_read_in_two_calls_has_the_rows_of_one():
    model, given = make("llama")
    tokens = given["input_ids"]
    with torch.no_grad(), mh.record(model) as maps:
        cache = model(tokens[:, :3]).past_key_values
        model(tokens[:, 3:], past_key_values=cache)
        model(tokens)
    first, second, whole = (x[1].weights() for x in maps)
    np.testing.assert_allclose(first, whole[:, :, :3, :3], atol=2e-6)
    np.testing.assert_allclose(second, whole[:, :, 3:], atol=2e-6)
    assert maps[1][1].weighting.origin.query == 3


def test_layers_and_heads_are_chosen_and_nothing_stays_changed():
    model, given = make("llama")
    before = transformers.AttentionInterface.get_interface
    with torch.no_grad(), mh.record(model) as maps:
        model(**given)
    with torch.no_grad(), mh.record(model, layers=[1], heads=[3, 0]) as chosen:
        model(**given)
        model(**given)
    assert transformers.AttentionInterface.get_interface is before
    assert len(chosen) == 2 and len(chosen[1]) == 1
    np.testing.assert_array_equal(
        chosen[1][0].weights(), maps[0][1].weights()[:, [3, 0]]
    )
    half = torch_families.make(CASES["llama"]).bfloat16()
    with torch.no_grad(), mh.record(half) as maps:
        half(**given)
    assert maps[0][0].key.dtype == np.float32
    with pytest.raises(ValueError, match="MptForCausalLM called no attention"):
        with mh.record(torch_families.make(CASES["mpt"])) as maps:
            pass
