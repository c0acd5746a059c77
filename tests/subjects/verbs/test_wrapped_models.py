"""Functions and PyTorch modules without some heads, and as files."""

import functools
import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import mha_haiku as mh
from mha_haiku.lab.heads import model_runs
from mha_haiku.subjects.subject import parts_of

B, T, C, D, G, H, K = 2, 7, 11, 16, 2, 6, 4
TOKENS = np.random.default_rng(0).integers(1, C, (B, T))
_SHAPES = {"q": (D, H * K), "k": (D, G * K), "v": (D, G * K), "o": (H * K, D)}


def _params(seed, **shapes):
    normal = np.random.default_rng(seed).standard_normal
    return {name: jnp.float32(normal(shape)) / 3 for name, shape in shapes.items()}


def _layer(params, x, *, how):
    counts = (-1,) * 3 if how == "reads" else (H, G, G)
    parts = zip("qkv", counts, strict=True)
    sides = x.shape[:2]
    q, k, v = ((x @ params[name]).reshape(*sides, n, K) for name, n in parts)
    if how == "attend":
        heads = mh.attend(q, k, v, mask=mh.masks.causal())[0]
    else:
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        mask = jnp.tril(jnp.ones((1, 1, *scores.shape[2:]), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        heads = jnp.einsum("bhts,bshk->bthk", weights, v)
    return x + heads.reshape(*sides, -1) @ params["o"]


def _function(how):
    """Makes a function of two layers, its parameters, and heads to keep."""
    layers = [_params(i, **_SHAPES) for i in range(1 + (how != "shared"))]
    keep = {"shared": [[1, 2]] * 2, "reads": [[0, 2, 3, 5], [1, 2]]}

    def function(params, tokens):
        x, layers = params["embedding"][tokens], params["layers"]
        for i, layer in enumerate((layers * 2)[:2]):
            with jax.named_scope(f"layer_{i}"):
                x = jax.checkpoint(functools.partial(_layer, how=how))(layer, x)
        return x @ params["embedding"].T

    params = {**_params(2, embedding=(C, D)), "layers": layers}
    return function, params, keep.get(how, [[1, 4, 5], [2, 3]])


def logits(subject, **inputs):
    run = jax.jit(functools.partial(model_runs.run, subject.model))
    return run(subject.params, subject.batches[0]._replace(**inputs)).logits


def _without(subject, keep):
    rows = enumerate(zip(parts_of(subject), keep, strict=True))
    gone = ((i, x) for i, (part, row) in rows for x in part.names if x not in row)
    return subject.ablated(*gone)


def _size(subject):
    return sum(x.size for x in jax.tree.leaves(subject.params))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reads", "names", "attend", "shared"])
def test_function_without_heads_computes_as_with_them_ablated(how, tmp_path):
    function, params, keep = _function(how)
    subject = mh.wrap(function, params, examples=[TOKENS])
    pruned, ablated = subject.prune(keep), _without(subject, keep)
    for tokens in (TOKENS, TOKENS[:, :5]):
        wanted = logits(ablated, inputs=tokens)
        chex.assert_trees_all_close(logits(pruned, inputs=tokens), wanted, atol=1e-5)
    groups = [len({x // (H // G) for x in row}) for row in keep]
    pairs = [*zip(keep, groups, strict=True)][: len(params["layers"])]
    columns = sum(2 * len(row) + 2 * n for row, n in pairs)
    assert _size(pruned) == (C + columns * K) * D
    assert f"{_size(pruned):,} parameters of {_size(subject):,}" in repr(pruned)
    is_smaller = [len(part.names) for part in parts_of(pruned)] == [*map(len, keep)]
    assert is_smaller == (how == "reads")
    gradient = jax.grad(lambda x: logits(pruned.replace(params=x)).sum())(pruned.params)
    chex.assert_trees_all_equal_shapes(gradient, pruned.params)
    names = [x.names for x in parts_of(pruned)] if is_smaller else keep
    again = pruned.prune([row[:1] for row in names])
    file = again.save(tmp_path / "new") / "model.safetensors"
    saved = sorted(safetensors.numpy.load_file(file).items())  # in the tree's order
    params = jax.tree.unflatten(jax.tree.structure(params), [x for _, x in saved])
    found = logits(subject.replace(params=params))
    chex.assert_trees_all_close(found, logits(again), atol=1e-5)
    assert _size(again) < _size(pruned)


@pytest.mark.slow
def test_tolerance_keeps_the_heads_that_matter_and_a_layer_may_have_none():
    function, params, _ = _function("names")
    for layer in params["layers"]:  # four heads write nothing
        layer["o"] *= jnp.ones(H * K).at[: 4 * K].set(1e-4)[:, None]
    wanted = function(params, TOKENS)
    changed = lambda logits, _: abs(logits - wanted).mean((1, 2))  # noqa: E731
    subject = mh.wrap(function, params, metric=changed, examples=[TOKENS])
    pruned = subject.prune(metric_drop=1e-2, examples=TOKENS)
    assert _size(pruned) == (C + 2 * 6 * K) * D  # heads 4 and 5, and group 1
    pruned, ablated = subject.prune([[], [4]]), _without(subject, [[], [4]])
    chex.assert_trees_all_close(logits(pruned), logits(ablated), atol=1e-5)
    assert _size(pruned) == (C + 4 * K) * D


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ([[1], [2]], "all layers that share parameters"),
        ([[H], [0]], "layer 0 must keep some of its heads"),
    ],
)
def test_heads_that_cannot_be_removed_are_refused_in_two_lines(keep, words):
    function, params, _ = _function("shared")
    with pytest.raises(ValueError, match=words) as refusal:
        mh.wrap(function, params, examples=[TOKENS]).prune(keep)
    assert len(str(refusal.value).splitlines()) <= 2


@pytest.fixture
def torch():
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs mha_haiku[torch]: torchax is not installed")
    return pytest.importorskip("torch", reason="needs mha_haiku[torch]")


_NAMES = "llama gpt2 bert t5 vit bart whisper mpt clip gpt_oss gemma2 mixtral".split()
_SMALLER = ("llama", "t5", "gpt_oss", "gemma2", "mixtral")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [*_NAMES[:2], *(pytest.param(x, marks=pytest.mark.weekly) for x in _NAMES[2:])],
)
def test_model_of_transformers_is_pruned_and_saved(name, torch, tmp_path):
    from tests.interop import torch_families

    case = torch_families.CASES[name]
    dtype = torch.bfloat16 if name == "gpt2" else torch.float32
    module = torch_families.make(case).to(dtype)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    own, inputs = dict(module.named_parameters()), [case.inputs()]
    subject = mh.wrap(module, examples=inputs)
    trained = {n: x * 1.25 if n in own else x for n, x in subject.params.items()}
    subject = subject.replace(params=trained)
    keep = [part.names[2:] for part in parts_of(subject)]
    pruned, wanted = subject.prune(keep), logits(_without(subject, keep))
    close = 1e-6 if dtype is torch.float32 else 3e-2
    for of, expected in ((subject, logits(subject)), (pruned, wanted)):
        folder = of.save(tmp_path / f"{_size(of)}")
        again = type(module).from_pretrained(folder).eval()
        assert again.dtype is dtype
        opened = mh.wrap(again, examples=inputs)
        scale = close * max(1, abs(expected).max())
        chex.assert_trees_all_close(logits(opened), expected, rtol=0, atol=scale)
        close *= 10
    chex.assert_trees_all_close(logits(pruned), wanted, rtol=0, atol=scale)
    assert (_size(opened) == _size(pruned) < _size(subject)) == (name in _SMALLER)
    assert all((x == before[name]).all() for name, x in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_other_module_is_saved_as_its_state(torch, tmp_path):
    import safetensors.torch

    def make():
        parts = torch.nn.Embedding(C, D), torch.nn.Linear(D, C, bias=False)
        parts[1].weight = parts[0].weight
        parts[1].register_buffer("steps", torch.randint(2**40, 2**50, ()))
        return torch.nn.Sequential(*parts)

    module, again = make(), make()
    file = mh.wrap(module, examples=[TOKENS]).save(tmp_path / "new")
    again.load_state_dict(safetensors.torch.load_file(file / "model.safetensors"))
    assert again[1].steps == module[1].steps
    tokens = torch.tensor(TOKENS)
    torch.testing.assert_close(again(tokens), module(tokens), rtol=0, atol=0)
