"""Attention of transformers' models by our engine, and functions of the user."""

import inspect

import jax
import numpy as np
import pytest

import mha_haiku as mh
from tests.interop.torch_packages import WARNINGS, torch, transformers

pytestmark = WARNINGS

from transformers import masking_utils  # noqa: E402
from transformers.integrations import moe  # noqa: E402

from tests.interop import torch_families  # noqa: E402
from tests.interop.torch_families import CASES, B, S  # noqa: E402


def make(name, attention="sdpa"):
    case = CASES[name]
    model = torch_families.make(case)
    model.set_attn_implementation(attention)
    return model, {key: torch.as_tensor(x) for key, x in case.inputs().items()}


def by_torch(model, given, **options):
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False  # with a cache a text is never taken for packed
    with torch.no_grad():
        return model(**given, **options)


def compare(model, given, rows=...):
    """Compares a wrapped model with torch, and returns it with its inputs."""
    expected = by_torch(model, given)
    expected = expected.get("logits", expected[0]).numpy()
    given = {name: x.numpy() for name, x in given.items()}
    subject = mh.wrap(model)
    atol = 1e-5 * np.abs(expected).max()
    found = np.asarray(subject.logits(given))
    np.testing.assert_allclose(found[rows], expected[rows], atol=atol)
    return subject, given


def squares(module, query, key, value, attention_mask, **options):
    """Attention as no library has it: weights are squares of scores."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(ratio, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)) ** 2
    if attention_mask is not None:
        is_mask = attention_mask.dtype == torch.bool
        scores = scores * (attention_mask if is_mask else attention_mask >= 0)
    weights = scores / scores.sum(-1, keepdim=True)
    return (weights @ value).transpose(1, 2), weights


def reversed_mask(*, batch_size, q_length, kv_length, **options):
    seen = torch.ones(q_length, kv_length, dtype=torch.bool).triu()
    return seen.expand(batch_size, 1, -1, -1)


def sums(module, hidden, index, weights):
    return hidden * weights.sum(-1, keepdim=True) + 1


ATTENTION = transformers.AttentionInterface
MASK = transformers.AttentionMaskInterface
EXPERTS = moe.ExpertsInterface
MINE = ATTENTION, "mine", squares
OF_PART = {"": "sdpa", "vision_config": "mine", "text_config": "sdpa"}
# What the user registers; the model; its attention, and its experts.
REGISTERED = {
    "attention": ([MINE], "llama", "mine", None),
    "its mask": ([MINE, (MASK, "mine", reversed_mask)], "llama", "mine", None),
    "a mask of transformers": (
        [MINE, (MASK, "mine", MASK._global_mapping["sdpa"])],
        "llama",
        "mine",
        None,
    ),
    "of a part": ([MINE], "clip", OF_PART, None),
    "by a known name": ([(ATTENTION, "sdpa", squares)], "llama", "sdpa", None),
    "mask": ([(MASK, "sdpa", reversed_mask)], "llama", "sdpa", None),
    "experts": ([(EXPERTS, "mine", sums)], "mixtral", "sdpa", "mine"),
}


@pytest.mark.parametrize("way", REGISTERED)
def test_functions_of_the_user_are_traced(monkeypatch, way):
    functions, name, attention, experts = REGISTERED[way]
    for interface, key, function in functions:
        monkeypatch.setitem(interface._global_mapping, key, function)
    model, given = make(name, attention)
    if experts:
        model.set_experts_implementation(experts)
    compare(model, given)


def test_an_eager_function_of_the_user_is_traced(monkeypatch):
    module = "transformers.models.llama.modeling_llama"
    monkeypatch.setattr(f"{module}.eager_attention_forward", squares)
    compare(*make("llama", "eager"))


PADDED = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * 7])  # at the left
PACKED = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
OWN = np.tri(S, dtype=np.float32)[None, None].repeat(B, 0) * 1e9 - 1e9
# The model, more inputs, and the mask of a map.
MASKED = {
    "padding": ("llama", {"attention_mask": PADDED}, "causal() & segments"),
    "packed": ("llama", {"position_ids": PACKED}, "_OfIndices"),
    "own": ("llama", {"attention_mask": OWN}, "full()"),
    "window": ("gemma2", {"attention_mask": PADDED}, "window(3, None) & causal()"),
    "both sides": ("bert", {"attention_mask": PADDED}, "segments"),
    "none": ("bert", {}, "full()"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "attention"),
    [(x, y) for x in MASKED for y in ("eager", "sdpa") if (x, y) != ("window", "sdpa")],
)
def test_masks_are_of_the_algebra_and_see_what_torch_sees(case, attention):
    name, extra, expected = MASKED[case]
    model, given = make(name, attention)
    given |= {key: torch.as_tensor(x) for key, x in extra.items()}
    is_padded = extra.get("attention_mask") is PADDED
    subject, given = compare(model, given, PADDED > 0 if is_padded else ...)
    maps = subject.maps(given)
    assert repr(maps[0].weighting.mask).startswith(expected)
    model.set_attn_implementation("eager")
    given = {key: torch.as_tensor(x) for key, x in given.items()}
    weights = by_torch(model, given, output_attentions=True).attentions
    for map_, expected in zip(maps, weights, strict=True):
        sees = np.asarray(map_.sees)[..., None]
        found = np.asarray(map_.weights())
        np.testing.assert_allclose(found, sees * expected.numpy(), atol=1e-5)
        if is_padded and name != "bert":
            assert sees.sum() == sees.size - 2 * sees.shape[1]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_that_are_not_causal_see_what_torch_lets_them_see(attention):
    model, given = make("llama", attention)
    for layer in model.model.layers:  # as in PaliGemma
        layer.self_attn.is_causal = False
    subject, given = compare(model, {"input_ids": given["input_ids"]})
    sees_later = subject.maps(given)[0].weights()[..., 0, 1:].any()
    assert sees_later == (attention == "sdpa")


def test_functions_without_a_kind_are_masks_of_rectangles():
    """A mask of mask functions of transformers, and of one of the user."""
    from mha_haiku.interop.torch_modules import attention_function, environment

    env = environment.environment()
    ids = np.array([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], np.int32)

    def same(example, head, query, key):
        return tensor[example, query] == tensor[example, key]

    def mask_of(ids):
        nonlocal tensor
        with env.running():
            tensor = env.j2t_iso(ids)
            chunks = masking_utils.chunked_causal_mask_function(3, tensor.new_zeros(B))
            both = masking_utils.or_masks(chunks, same)
            return attention_function._as_mask(both, B)

    tensor = None
    mask = jax.jit(mask_of)(ids)
    at = np.arange(S)
    chunks = (at[:, None] // 3 == at // 3) & (at[:, None] >= at)
    expected = chunks | (ids[:, :, None] == ids[:, None])
    np.testing.assert_array_equal(mask.array(S, S), expected)
    tile = mask.aligned(1).at_head((1,), 0).aligned_tile(at[2:4], at[1:6])
    np.testing.assert_array_equal(tile[0], expected[1, 2:4, 1:6])
