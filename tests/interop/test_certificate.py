"""A PyTorch module next to its copy in JAX: faults are found, and nothing else."""

import numpy as np
import pytest

import mha_haiku as mh
from tests.interop.torch_packages import WARNINGS, torch

pytestmark = WARNINGS

import torch.nn.functional as F  # noqa: E402, N812
from transformers import modeling_utils  # noqa: E402

from tests.interop import torch_families  # noqa: E402
from tests.interop.torch_families import CASES  # noqa: E402

B, T, D = 2, 5, 8
TOKENS = np.random.default_rng(0).integers(3, 31, (B, T))


class Function(torch.nn.Module):
    """A function of tokens `[B, T]` and of their embedding `[B, T, D]`."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(31, D)
        self.first, self.last = (torch.nn.Linear(D, D) for _ in range(2))
        self.function = function

    def forward(self, tokens):
        x = self.function(tokens, self.first(self.embed(tokens)))
        return (self.last(x[0]), *x[1:]) if isinstance(x, tuple) else self.last(x)


def _written(write):
    def function(_, x):
        y = x.clone()
        write(y)
        return y

    return function


def _attention(scale=D**-0.5, mask=True, eps=1e-5, heads=(2, 4)):
    def function(_, x):
        x = F.layer_norm(x, (D,), eps=eps)
        q = x.unflatten(-1, heads).transpose(1, 2)
        scores = scale * q @ q.mT
        if mask:
            scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
        return x + (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)

    return function


class Straight(torch.autograd.Function):
    """Signs, with the gradient of the identity."""

    @staticmethod
    def forward(context, x):
        return x.sign()

    @staticmethod
    def backward(context, slopes):
        return slopes


def _without_slopes(_, x):
    with torch.no_grad():
        kept = x[..., :4].square()
    return torch.cat([kept, x[..., 4:]], -1)


def _embedded(number):
    return lambda tokens, x: x + number(tokens)[..., None] / 97


def _plain(_, x):
    return x


_squares = lambda _, x: torch.cat([x[..., :4].square(), x[..., 4:]], -1)  # noqa: E731

# What torch computes, what a copy computes in its place, and where they are found.
FAULTS = {
    "int64": (
        _embedded(lambda x: x.long() * 1000003 * 1000003 % 97),
        _embedded(lambda x: x.int() * 1000003 * 1000003 % 97),
        "last",
    ),
    "xor": (_embedded(lambda x: x ^ 5), _embedded(lambda x: x | 5), "last"),
    "lost write": (_written(lambda y: y[:, 1:3].fill_(3)), _plain, "last"),
    "scale": (_attention(), _attention(scale=1.01 * D**-0.5), "last"),
    "mask": (_attention(), _attention(mask=False), "last"),
    "epsilon": (_attention(), _attention(eps=1e-2), "last"),
    "heads": (_attention(), _attention(heads=(4, 2)), "last"),
    "gelu": (
        lambda _, x: F.gelu(3 * x),
        lambda _, x: F.gelu(3 * x, approximate="tanh"),
        "last",
    ),
    "one position": (_plain, _written(lambda y: y[1, -1].mul_(1.01)), "last"),
    "not a number": (_plain, lambda _, x: torch.where(x > 1, torch.nan, x), "last"),
    "second output": (lambda _, x: (x, x + 1), lambda _, x: (x, x + 1.01), r"\[1\]"),
    "dropout": (_plain, lambda _, x: F.dropout(x, 0.1, training=True), "last"),
    "detach": (
        lambda _, x: torch.cat([x[..., :4].detach(), x[..., 4:]], -1),
        lambda _, x: torch.cat([x[..., :4], x[..., 4:]], -1),
        "gradients",
    ),
    "no_grad": (_without_slopes, _squares, "gradients"),
    "data": (lambda _, x: x + x.data, lambda _, x: x + x, "gradients"),
    "own backward": (
        lambda _, x: Straight.apply(x),
        lambda _, x: x.sign(),
        "gradients",
    ),
}


def _changed(module, change):
    """A subject whose copy is changed, as if it had been converted wrongly."""
    subject = mh.wrap(module)
    change(subject.certifier.module.copy)
    return subject


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_that_names_its_place(name):
    right, wrong, place = FAULTS[name]
    subject = _changed(Function(right), lambda copy: setattr(copy, "function", wrong))
    is_slope = place == "gradients"
    said = "gradients +differs .*after first.bias" if is_slope else f"differs .*{place}"
    with pytest.raises(ValueError, match=said):
        subject.logits(TOKENS)
    assert "torch: differs in 1 call" in repr(subject)
    # Nothing else is a fault.
    right = mh.wrap(Function(wrong if name == "dropout" else right))
    verdict = "not compared" if name == "dropout" else "equal"
    assert right.check(TOKENS).verdict == verdict


IN_LLAMA = {
    "rotary": (
        lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.1),
        "model/rotary_emb",
    ),
    "norm": (
        lambda model: setattr(
            model.model.layers[1].post_attention_layernorm, "variance_epsilon", 0.1
        ),
        "model/layers_1/post_attention_layernorm",
    ),
    "scale": (
        lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.4),
        "model/layers_1/self_attn/o_proj",
    ),
    "activation": (
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
        "model/layers_0/mlp/act_fn",
    ),
    "own attention": (
        lambda model: model.set_attn_implementation("eager"),
        "model/layers_0/self_attn/o_proj",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_LLAMA)
def test_the_first_site_that_differs_is_named(name):
    change, site = IN_LLAMA[name]
    model = torch_families.make(CASES["llama"])
    if name == "own attention":
        modeling_utils.AttentionInterface.register("tanh", _tanh)
        model.set_attn_implementation("tanh")
    subject = _changed(model, change)
    with pytest.raises(ValueError, match=f"differs: {site}\n") as caught:
        subject.maps(CASES["llama"].inputs())
    assert "check=False" in str(caught.value)


def _tanh(module, query, key, value, *args, **options):
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    weights = torch.tanh(query @ key.mT).abs()
    return (weights[..., :2] @ value[..., :2, :]).transpose(1, 2), weights


def test_maps_that_are_not_those_of_the_heads_are_found(monkeypatch):
    subject = mh.wrap(Function(_attention()))
    assert subject.check(TOKENS).verdict == "equal"
    apply = mh.AttentionMap.apply
    monkeypatch.setattr(mh.AttentionMap, "apply", lambda self, x: 1.01 * apply(self, x))
    with pytest.raises(ValueError, match="maps +differs .*attention_0"):
        subject.check(TOKENS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rounding_is_no_fault(dtype):
    module = Function(_attention(scale=3)).to(dtype)
    assert mh.wrap(module).check(TOKENS).verdict == "equal"
    wrong = lambda copy: setattr(copy, "function", lambda _, x: 2 * x)  # noqa: E731
    with pytest.raises(ValueError, match="differs"):
        _changed(module, wrong).check(TOKENS)


def test_check_false_goes_on_and_still_tells():
    subject = mh.wrap(Function(_plain), check=False)
    subject.certifier.module.copy.function = lambda _, x: x + 1
    assert subject.logits(TOKENS).shape == (B, T, D)
    assert not subject.certifier.found
    found = subject.check(TOKENS)
    assert found.verdict == "differs" and "NOT" in str(found)
    assert [row["part"] for row in found.rows()][0] == "outputs"
    with pytest.raises(ValueError, match="is no PyTorch module"):
        mh.wrap(lambda params, x: x).check(TOKENS)


def test_calls_of_a_kind_are_compared_once():
    subject = mh.wrap(Function(_plain))
    for size, count in ((5, 1), (6, 1), (9, 2)):
        subject.logits(np.ones((1, size), int))
        assert len(subject.certifier.found) == count


def test_a_module_is_traced_once_for_each_kind_of_call():
    traced = []  # whether a tensor is ours
    function = lambda _, x: traced.append(hasattr(x, "_env")) or x  # noqa: E731
    subject = mh.wrap(Function(function))
    for size, count in ((5, 1), (5, 1), (6, 2)):
        subject.logits(np.ones((1, size), int))
        subject.sites(np.ones((1, size), int))
        assert sum(traced) == count
