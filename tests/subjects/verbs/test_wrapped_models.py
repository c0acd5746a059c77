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
    names = enumerate(x.names for x in parts_of(subject))
    return subject.ablated(*((i, x) for i, row in names for x in {*row} - {*keep[i]}))


def _size(subject):
    return sum(x.size for x in jax.tree.leaves(subject.params))


def _operations(subject):
    run = model_runs.logits(subject.model)
    example = subject.batches[0]
    program = jax.jit(lambda x: run(x, example)).lower(subject.params).compile()
    return program.cost_analysis()["flops"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reads", "names", "attend", "long", "shared"])
def test_function_without_heads_computes_as_with_them_ablated(how, tmp_path):
    function, params, keep = _function(how.replace("long", "attend"))
    examples = [TOKENS if how != "long" else np.tile(TOKENS, 60)]
    subject = mh.wrap(function, params, examples=examples)
    pruned, ablated = subject.prune(keep), _without(subject, keep)
    wanted = logits(ablated, inputs=TOKENS[:, :5])
    found = logits(pruned, inputs=TOKENS[:, :5])  # the whole ones are compared by prune
    chex.assert_trees_all_close(found, wanted, atol=1e-5)
    rows = keep[: len(params["layers"])]
    columns = sum(2 * len(row) + 2 * len({x // (H // G) for x in row}) for row in rows)
    assert _size(pruned) == (C + columns * K) * D
    assert f"{_size(pruned):,} parameters of {_size(subject):,}" in repr(pruned)
    if how != "long":  # in which a loop counts once
        assert _operations(pruned) < 0.75 * _operations(subject)
    assert [list(part.names) for part in parts_of(pruned)] == keep
    for row, *maps in zip(keep, pruned.maps(TOKENS), ablated.maps(TOKENS), strict=True):
        one, other = (x.weights() for x in maps)
        chex.assert_trees_all_close(one, other[:, np.array(row)], atol=1e-5)
    gradient = jax.grad(lambda x: logits(pruned.replace(params=x)).sum())(pruned.params)
    chex.assert_trees_all_equal_shapes(gradient, pruned.params)
    again = pruned.prune([row[:1] for row in keep])
    chex.assert_trees_all_close(
        logits(again), logits(_without(subject, [row[:1] for row in keep])), atol=1e-5
    )
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
    for keep in ([[0, 4], [4]], [[0], [4]], [[], [4]]):  # one after the other
        ablated, before = _without(subject, keep), pruned
        pruned = (subject if keep[0] == [0, 4] else pruned).prune(keep)
        chex.assert_trees_all_close(logits(pruned), logits(ablated), atol=1e-5)
    assert _size(pruned) == (C + 4 * K) * D
    assert [part.names for part in parts_of(pruned)] == [(4,)]
    assert _operations(pruned) < 0.8 * _operations(before)


@pytest.mark.slow
def test_a_sweep_and_gates_remove_the_heads_that_write_nothing(tmp_path):
    function, params, _ = _function("names")
    for layer in params["layers"]:
        layer["o"] *= jnp.ones(H * K).at[: 4 * K].set(0)[:, None]
    changed = lambda x, batch: abs(x - function(params, batch.inputs)).mean((1, 2))  # noqa: E731
    rows = np.random.default_rng(1).integers(1, C, (24, T))
    subject = mh.wrap(function, params, metric=changed)
    how = {"examples": rows, "order": "attribution", "baseline": "attribution"}
    swept = subject.sweep(keep=0.0, sizes=3, **how)
    assert [point.kept for point in swept.points] == [12, 8, 4, 0]
    assert swept.points[2].keep == [[4, 5], [4, 5]]
    found = [point.metrics["loss"] for point in swept.points]
    np.testing.assert_allclose(found, swept.baseline, rtol=1e-4, atol=1e-6)
    assert "loss: the metric, units of the metric" in swept.text()
    how = {"penalty": 1e-3, "steps": 70, "tuning_steps": 2, "examples": rows}
    first, again = (subject.learn_gates(tmp_path / "gates", **how) for _ in range(2))
    whole, before, tuned = first.points
    assert whole.kept == 12 and before.keep == tuned.keep == [[4, 5], [4, 5]]
    assert tuned.metrics == again.points[2].metrics


def test_heads_that_cannot_be_removed_are_refused_in_two_lines():
    function, params, _ = _function("shared")
    subject = mh.wrap(function, params, examples=[TOKENS])
    with pytest.raises(ValueError, match="all layers that share") as refusal:
        subject.prune([[1], [2]])
    assert len(str(refusal.value).splitlines()) == 2


@pytest.fixture
def torch():
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs mha_haiku[torch]: torchax is not installed")
    return pytest.importorskip("torch", reason="needs mha_haiku[torch]")


_NAMES = "llama gpt2 bert t5 vit bart whisper mpt clip gpt_oss gemma2 mixtral".split()
_WEEKLY = [pytest.param(name, marks=pytest.mark.weekly) for name in _NAMES[2:]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*_NAMES[:2], *_WEEKLY])
def test_model_of_transformers_is_pruned_and_saved(name, torch, tmp_path):
    from tests.interop import torch_families

    case = torch_families.CASES[name]
    dtype = torch.bfloat16 if name == "gpt2" else torch.float32
    module = torch_families.make(case).to(dtype)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    own, inputs = dict(module.named_parameters()), [case.inputs()]
    subject = mh.wrap(module, examples=inputs)
    subject.params.update({name: 1.25 * subject.params[name] for name in own})
    keep = [part.names[2:] for part in parts_of(subject)]
    pruned, wanted = subject.prune(keep), logits(_without(subject, keep))
    close = 1e-6 if dtype is torch.float32 else 3e-2
    for of, expected in ((subject, logits(subject)), (pruned, wanted)):
        again = type(module).from_pretrained(of.save(tmp_path / f"{_size(of)}"))
        assert again.dtype is dtype
        opened = mh.wrap(again, examples=inputs)
        scale = close * max(1, abs(expected).max())
        chex.assert_trees_all_close(logits(opened), expected, rtol=0, atol=scale)
        close *= 10
    chex.assert_trees_all_close(logits(pruned), wanted, rtol=0, atol=scale)
    is_smaller = name in ("llama", "t5", "gpt_oss", "gemma2", "mixtral")
    assert (_size(opened) == _size(pruned) < _size(subject)) == is_smaller
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
