"""Operations of PyTorch in JAX, next to torch itself."""

import concurrent.futures
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.interop.torch_modules import conversion
from tests import everyday
from tests.interop.torch_packages import torch

functional = torch.nn.functional
B, T, S, H, K, V = 2, 3, 5, 4, 8, 6
X = np.random.default_rng(0).normal(size=(B, T, K)).astype(np.float32)
TOKENS = np.array([[1, 2, 5, 4, 3]])
# Theirs.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class OfTokens(torch.nn.Module):
    """A function of an embedding `[B, T, 8]` and of its tokens."""

    def __init__(self, function):
        super().__init__()
        self.embed, self.function = torch.nn.Embedding(31, 8), function

    def forward(self, tokens):
        return self.function(self.embed(tokens), tokens)


def like_torch(function, x):
    expected = function(torch.tensor(x)).detach().numpy()
    result = jax.jit(conversion.convert(Of(function)).function)({}, x).logits
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


VIEWS = {
    "view": lambda x: x.view(B * T, K),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 4)),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze_": lambda x: x[0].unsqueeze_(1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "split": lambda x: x.split([1, 2], 1)[1],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "tensor_split": lambda x: x.tensor_split(2, 2)[0],
    "slices": lambda x: x[:, ::2, 1:],
    "as_strided": lambda x: x[1].as_strided((2, 2), (8, 1)),
    "unfold": lambda x: x.unfold(2, 2, 2),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "int32": lambda x: x.view(torch.int32),
    "imag": lambda x: torch.view_as_complex(x.view(B, T, 4, 2)).imag,
    "real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(B, T, 4, 2))),
    "of views": lambda x: x[:, 1:].transpose(0, 1)[0].unsqueeze(0),
    "a copy": lambda x: x.transpose(0, 1).reshape(-1)[:4],
    "itself": lambda x: x,
}
WRITES = {
    "fill_": lambda v, _: v.fill_(3),
    "copy_": lambda v, _: v.copy_(2 * torch.ones_like(v)),
    "add_": lambda v, x: v.add_(x.sum().to(v.dtype)),
    "mul_": lambda v, _: v.mul_(2),
    "zero_": lambda v, _: v.zero_(),
    "index": lambda v, _: v.__setitem__(0, 7),
    "indices": lambda v, _: v.__setitem__(torch.tensor([0]), 4),
    "mask": lambda v, _: v.__setitem__(v > 0, 0),
    "masked_fill_": lambda v, _: v.masked_fill_(v > 0, 1),
    "out": lambda v, _: torch.add(v, 1, out=v),
    "abs_": lambda v, _: v.abs_(),
    "index_add_": lambda v, _: v.index_add_(0, torch.tensor([0]), v[:1].clone()),
    "relu": lambda v, _: functional.relu(v, inplace=True),
    "base": lambda _, x: x.mul_(3),
}


@pytest.mark.parametrize("view", everyday.some(VIEWS, 9))
def test_writes_into_views_change_what_they_are_views_of(view):
    def results(x):
        for name, write in WRITES.items():
            y = x.clone()
            part = VIEWS[view](y)
            if not (name in ("abs_", "relu") and part.dtype == torch.int32):
                write(part, y)
            yield y.flatten()
            yield part.flatten().to(y.dtype)

    like_torch(lambda x: torch.cat(list(results(x))), X)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(context, x, factor):
        context.save_for_backward(x)
        context.factor = factor
        return factor * x * x

    @staticmethod
    def backward(context, slopes):
        return slopes * context.saved_tensors[0] * context.factor / 2, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context, slopes, _):
        return 3 * slopes * context.saved_tensors[1], None


KEPT = Squares.apply


def _written_without_grad(x):
    y = 2 * x
    with torch.no_grad():
        y[:, 0].mul_(3)
    return y * y


def _partly(mode):
    def function(x):
        with mode():
            y = x.exp()
        return y + x

    return function


STOPPED = {
    "detach": lambda x: x[..., :4].detach() * x[..., 4:],
    "torch.detach": lambda x: torch.detach(x) * x,
    "detach_": lambda x: x.clone().detach_() + x,
    "data": lambda x: x.data * x,
    "no_grad": _partly(torch.no_grad),
    "inference_mode": _partly(torch.inference_mode),
    "set_grad_enabled": _partly(lambda: torch.set_grad_enabled(False)),
    "decorator": lambda x: torch.no_grad()(torch.sin)(x) + x,
    "written": _written_without_grad,
    "straight through": lambda x: x + (x.round() - x).detach(),
    "function": lambda x: Squares.apply(x, 3.0) * x,
    "setup_context": lambda x: Product.apply(x, x + 1)[0] + Product.apply(x, x)[1],
    "kept": lambda x: KEPT(x, 2.0) + x,
    "nested": lambda x: Squares.apply(Squares.apply(x, 2.0), 3.0),
    "not stopped": lambda x: x.clone().masked_fill_(x > 0, 0.0) * x,
}


@pytest.mark.parametrize("kind", STOPPED)
def test_gradients_stop_where_those_of_torch_do(kind):
    x = torch.tensor(X, requires_grad=True)
    (STOPPED[kind](x) ** 2).sum().backward()
    function = conversion.convert(Of(STOPPED[kind])).function
    loss = lambda x: (function({}, x).logits ** 2).sum()  # noqa: E731
    slopes = jax.jit(jax.grad(loss))(jnp.array(X))
    np.testing.assert_allclose(slopes, x.grad, rtol=1e-4, atol=1e-4)
    like_torch(STOPPED[kind], X)


class Gated(OfTokens):
    """Attention, of which a function is computed, with gates of heads for torch."""

    def forward(self, tokens, gates=None):
        query = self.embed(tokens).unflatten(-1, (2, 4)).transpose(1, 2)
        heads = (query @ query.mT).softmax(-1) @ query
        heads = heads if gates is None else heads * gates[:, None, None]
        return self.function(heads.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["detach", "no_grad", "data", "written", "kept"])
def test_importance_has_the_gradients_of_torch(kind):
    module, gates = Gated(STOPPED[kind]).eval(), torch.ones(2, requires_grad=True)
    (module(torch.tensor(TOKENS), gates) ** 2).mean().backward()
    metric = lambda x, _: (x**2).mean((1, 2))  # noqa: E731
    subject = mh.wrap(module, examples=[TOKENS], metric=metric)
    slopes = subject.importance("gradient").mean[0]
    np.testing.assert_allclose(slopes, gates.grad.abs(), rtol=1e-4)


BIG = np.array([[1, 2, 30000, 2**31 - 5]])
INTEGERS = {
    "hash": lambda x: x * 1000003 % 97,
    "xor": lambda x: ((x << 20) ^ (x * 6364136223846793005)) % 1009,
    "sums": lambda x: x.cumsum(1) % 1009 + x.prod() % 1009,
    "pow": lambda x: x**3 % 1009,
    "floor": lambda x: x * -5 // 7 % 1000,
    "truncated": lambda x: torch.div(x * -5, 7, rounding_mode="trunc") % 1000,
    "least": lambda x: (torch.full_like(x, torch.iinfo(x.dtype).min) < -x).int(),
    "bytes": lambda x: (x.to(torch.uint8) * 3 + 200).int(),
    "shorts": lambda x: (x.to(torch.int16) * 30000).int(),
    "doubles": lambda x: (x.double() / 3 * 1e9 % 1000).float(),
    "quotient": lambda x: x / 3,
    "places": lambda x: x.argmax(-1) + x.argmin(-1) + x.float().argmax(-1),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_have_the_bits_of_torch(kind):
    like_torch(INTEGERS[kind], BIG)


@pytest.mark.parametrize("mask", ["bool", "inf", "batch", "causal", "none"])
@pytest.mark.parametrize("num_heads", [H, 2])
def test_attention_is_that_of_torch_and_zero_where_nothing_is_seen(mask, num_heads):
    seen = torch.ones(T, S, dtype=torch.bool)
    seen[1] = False
    options = {
        "bool": {"attn_mask": seen},
        "inf": {"attn_mask": torch.zeros(T, S).masked_fill(~seen, -torch.inf)},
        "batch": {"attn_mask": torch.tensor([True, False])[:, None, None, None]},
        "causal": {"is_causal": True, "scale": 0.3},
        "none": {"scale": -0.3},
    }[mask]

    def attend(x):
        query, key, value = x.split([H * T * K, num_heads * S * K, num_heads * S * V])
        shapes = (H, T, K), (num_heads, S, K), (num_heads, S, V)
        arrays = zip((query, key, value), shapes, strict=True)
        query, key, value = (
            torch.stack([x.view(shape), 2 * x.view(shape)]) for x, shape in arrays
        )
        return functional.scaled_dot_product_attention(
            query, key, value, **options, enable_gqa=num_heads != H
        )

    size = H * T * K + num_heads * S * (K + V)
    numbers = np.random.default_rng(0).normal(size=size).astype(np.float32)
    like_torch(attend, numbers)
    subject = mh.wrap(Of(lambda x: attend(x[0])), check=False)
    (map_,) = subject.maps(numbers[None])
    assert map_.shape == (B, H, T, S)
    if mask in ("bool", "inf"):
        assert (map_.weights()[:, :, 1] == 0).all()


RANDOM = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "constant": lambda x: x * 0 + torch.rand(x.shape),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.5
    ),
    **{
        name: lambda x, name=name: getattr(torch, name)(x.sigmoid())
        for name in ("rand_like", "randn_like", "bernoulli")
    },
    **{
        name: lambda x, name=name: getattr(x.clone(), name)()
        for name in ("normal_", "uniform_", "exponential_", "cauchy_", "random_")
    },
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_numbers_are_new_in_a_call_and_the_same_in_the_next(kind):
    before, pair = torch.get_rng_state(), torch.stack
    module = Of(lambda x: pair([RANDOM[kind](x), RANDOM[kind](x)]))
    subject = mh.wrap(module, check=False)
    first, again = (np.asarray(subject.logits(X)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (first[0] != first[1]).any()
    assert subject.sites(X) is not None and torch.equal(before, torch.get_rng_state())


OPERATIONS = {
    "keyword": lambda x: functional.linear(x, weight=torch.ones(5, K)),
    "all true": lambda x: x * torch.ops.aten._is_all_true(x < 9),
    "inference": lambda x: torch.inference_mode()(lambda y: y.mul_(2)[:, 1:])(x + 0),
    "list": lambda x: x[..., [-2], :],
    "place": lambda x: x[x.argmax(-1)[0, 0] % 2],
    "decomposed": lambda x: torch.logit(x.sigmoid()) + functional.mish(x),
    "validated": lambda x: torch.distributions.StudentT(x.exp() + 2).log_prob(x),
    "constants": lambda x: torch.stft(
        x[0], 4, window=torch.ones(4), return_complex=True
    ).abs(),
    **{
        f"{mode} {size}": lambda x, mode=mode, size=size: functional.interpolate(
            x[None], size, mode=mode, antialias=True, align_corners=size[0] > 2
        )
        for mode in ("bilinear", "bicubic")
        for size in [(2, 2), (3, 9)]
    },
    **{
        f"bags {mode} {shape}": lambda x, mode=mode, shape=shape: (
            functional.embedding_bag(
                torch.arange(6).reshape(shape),
                x.reshape(-1, 1)[:6],
                torch.tensor([0, 2]) if len(shape) == 1 else None,
                mode=mode,
                per_sample_weights=x.reshape(-1)[:6].reshape(shape)
                if mode == "sum"
                else None,
            )
        )
        for mode in ("sum", "mean", "max")
        for shape in [(2, 3), (6,)]
    },
    "resized by factors": lambda x: functional.interpolate(
        x[None], scale_factor=(1.1, 2.0), mode="bilinear"
    ),
    "like a constant": lambda x: x + torch.ones_like(torch.arange(K), device=x.device),
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations_that_torchax_lacks_are_those_of_torch(kind):
    like_torch(OPERATIONS[kind], X)


READ = {
    "item": lambda x, tokens: x * tokens.max().item(),
    "assert": lambda x, tokens: x if tokens.max() <= 9 else 2 * x,
    "any": lambda x, tokens: 2 * x if (tokens == 0).any() else x,
    "list": lambda x, tokens: x + sum(tokens.tolist()[0]),
    "nonzero": lambda x, tokens: x[:, (tokens[0] > 3).nonzero()[:, 0]],
    "rows": lambda x, tokens: x[tokens > 3][None],
    "repeated": lambda x, tokens: x[0].repeat_interleave(tokens[0], 0)[None],
    "range": lambda x, tokens: sum([x for _ in range(int(tokens[0, 0]))]),
    "moved": lambda x, tokens: x * (1 - tokens).to(x.device).flatten().min().item(),
    "made": lambda x, tokens: x if torch.full((2,), 3, device=x.device).any() else 0,
}


@pytest.mark.parametrize("kind", READ)
def test_values_of_integers_are_read_once_for_each_input(kind):
    module = OfTokens(READ[kind])
    subject = mh.wrap(module)
    for tokens in (TOKENS, (TOKENS + 3) % 8):
        expected = module(torch.tensor(tokens)).detach()
        np.testing.assert_allclose(subject.logits(tokens), expected, rtol=1e-5)
        assert ("a program per input" in repr(subject)) == (kind != "made")
    assert subject.check(TOKENS).verdict == "equal"


@pytest.mark.parametrize("kind", ["float", "bool", "buffer"])
def test_masks_of_torch_transformers_are_not_read(kind):
    layer = torch.nn.TransformerEncoderLayer(K, 2, 8, dropout=0.0, batch_first=True)
    module = Of(lambda x, mask=None: module.stack(x, mask=module.seen(mask)))
    module.stack = torch.nn.TransformerEncoder(layer, 1)
    module.register_buffer("mask", torch.ones(9, 9).triu(1).bool())
    module.seen = lambda x: module.mask[:T, :T] if x is None else x
    mask = np.triu(np.ones((T, T), bool), 1)
    mask = np.where(mask, -np.inf, 0).astype("f4") if kind == "float" else mask
    module.forward = module.function
    given = {"x": X} | ({} if kind == "buffer" else {"mask": mask})
    assert mh.wrap(module).check(given).verdict == "equal"


def test_values_of_features_are_refused_at_the_line_that_reads_them():
    for read in (lambda x: bool(x.sum() > 0), lambda x: x[x > 0], lambda x: x.tolist()):
        with pytest.raises(
            ValueError, match=r"Of.* reads values at \S*environment.py:"
        ):
            mh.wrap(Of(read)).logits(X)


def test_large_integers_among_inputs_are_themselves():
    tokens = np.array([[2**33 + 7, 5, 1_700_000_000_000]])
    module = OfTokens(lambda x, _: x)
    module.forward = lambda tokens: module.embed(tokens % 31)
    expected = module(torch.tensor(tokens)).detach()
    np.testing.assert_array_equal(mh.wrap(module).logits(tokens), expected)


def test_threads_trace_one_after_another():
    def delayed(x):
        time.sleep(0.05)
        return functional.dropout(x, 0.0) * 2

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        subjects = [mh.wrap(Of(delayed), check=False) for _ in range(3)]
        for result in pool.map(lambda subject: subject.logits(X), subjects):
            np.testing.assert_array_equal(result, 2 * X)
    assert not hasattr(torch, "privateuseone")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*Python 3.13.0")
def test_torch_itself_stays_as_it_was():
    module = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.ReLU()).eval()
    x, query = torch.tensor(X), torch.ones(1, 2, 16, 16)
    before = torch.compile(module, backend="aot_eager")(x)
    np.testing.assert_allclose(mh.wrap(module).logits(X), before.detach(), 1e-5, 1e-6)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, backend="aot_eager")(x), before)
    assert torch.equal(torch.nn.DataParallel(module)(x), before)
    assert torch.nn.attention.flex_attention.flex_attention(query, query, query).any()
    data = torch.utils.data.TensorDataset(x)
    assert len(list(torch.utils.data.DataLoader(data, pin_memory=True))) == B
    assert not torch.accelerator.is_available()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_counterpart_is_one_sentence():
    linear = torch.nn.Sequential(torch.nn.Linear(K, K))
    eight_bits = torch.ao.quantization.quantize_dynamic(linear, {torch.nn.Linear})
    noise = Of(lambda x: torch.ops.aten.rrelu_with_noise(x, x, 0.1, 0.3, False))
    for module, name in (
        (eight_bits, "quantized.linear_dynamic"),
        (noise, "rrelu_with_noise"),
    ):
        with pytest.raises(ValueError, match=f"can be traced: .*{name}") as caught:
            mh.wrap(module, check=False).logits(X)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_variable_of_the_process_is_restored(before, monkeypatch):
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    mh.wrap(torch.nn.Linear(3, 2)).logits(np.ones((1, 3), np.float32))
    assert os.environ.get(name) == before
