"""An edit of one site reaches no other, whatever the names of the two have in common.

The same function is measured with names that nothing can confuse, and with names of
which a pattern of one also matches the other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import heads, tasks
from mha_haiku.lab.heads import edits, model_runs, why

B, T, D, H, C = 2, 5, 12, 3, 7
APART = ("first_0", "first_0/norm", "second_0", "second_0/norm")
ALIKE = {
    "inside of the layer": (
        "layer_0/inner/attn",
        "layer_0/inner/norm",
        "layer_0/attn",
        "layer_0/norm",
    ),
    "in another tower": (
        "tower/layer_0/attn",
        "tower/layer_0/norm",
        "layer_0/attn",
        "layer_0/norm",
    ),
    "with the names of BERT": (
        "layer/0/attention/self",
        "layer/0/attention/output/LayerNorm",
        "layer/0/self",
        "layer/0/output/LayerNorm",
    ),
    "with a layer of two numbers": ("0/1/attn", "0/1/norm", "0/attn", "0/norm"),
}


def _params():
    generator = np.random.default_rng(0)
    shapes = {f"{name}{i}": (D, D) for name in "qkvo" for i in range(2)}
    shapes |= {"e": (C, D), "u": (D, C)}
    return {
        name: np.float32(1.5 * generator.standard_normal(shape) / D**0.5)
        for name, shape in shapes.items()
    }


def _norm(x, name):
    with jax.named_scope(name):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)


@functools.cache
def subject(*names):
    """Returns a function of two attentions, each after a norm, as a measure's subject.

    `names` are the scopes of both, attention first.
    """

    def function(params, tokens):
        x = params["e"][tokens]
        for i, (attention, norm) in enumerate((names[:2], names[2:])):
            y = _norm(x, norm)
            with jax.named_scope(attention):
                q, k, v = (
                    (y @ params[f"{name}{i}"]).reshape(*y.shape[:2], H, -1)
                    for name in "qkv"
                )
                weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
                z = jnp.einsum("bhts,bshk->bthk", weights, v).reshape(y.shape)
            x = x + z @ params[f"o{i}"]
        return x @ params["u"]

    generator = np.random.default_rng(1)
    tokens = generator.integers(0, C, (3, B, T)).astype(np.int32)
    given = mh.models.of_function(function), heads.metrics.loss, _params()
    clean, other = (tasks.Example(x, tokens[2], np.ones((B, T))) for x in tokens[:2])
    return heads.Measured(*given, [clean]), [other]


def _one(measured):
    return tasks.Example(measured.batches[0].inputs[:1], None, None)


def _explained(function):
    def call(measured, other):
        del other
        return function(measured.model, measured.params, _one(measured))

    return call


def _circuit(measured, other):
    found = heads.circuit_of_heads(measured, other, edges=4)
    return found.edges.per_example, found.only, found.without


def _ablated(measured, other):
    del other

    def function(params, tokens):
        return measured.model.apply(params, None, tokens, is_training=False).logits

    inputs = measured.batches[0].inputs
    return mh.wrap(function, measured.params).ablated((1, 1)).logits(inputs)


CALLS = {
    "ablation": lambda x, _: heads.ablation(x).per_example,
    "gradient": lambda x, _: heads.gradient(x).per_example,
    "attribution": lambda x, _: heads.attribution(x).per_example,
    "patching": lambda *x: heads.activation_patching(*x).per_example,
    "paths": lambda *x: heads.path_patching(*x).per_example,
    "circuit": _circuit,
    "ablated": _ablated,
    "why": _explained(lambda *x: why.pairs(*x, 1, 2, 4, 2).terms),
    "writes": _explained(lambda *x: why.written(*x, 1, 2, 4).terms),
    "reads": _explained(lambda *x: why.reads(*x[:2], [x[2]]).by),
    "logits": _explained(lambda *x: heads.logit_attribution(*x).heads),
    "lens": _explained(heads.logit_lens),
}


@functools.cache
def _measured(call, names):
    return CALLS[call](*subject(*names))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("names", ALIKE)
def test_sites_are_edited_by_their_whole_names(names, call):
    expected, found = _measured(call, APART), _measured(call, ALIKE[names])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


@pytest.mark.parametrize("call", ["why", "writes", "reads", "lens"])
def test_terms_that_do_not_add_up_are_refused(monkeypatch, call):
    """As if an edit of one site reached others."""
    made, run = edits.on_parts, model_runs.run_edited

    def confused(names, trees, change):
        trees = dict(zip(names, trees, strict=True))
        last = [x for name, x in trees.items() if name.endswith("factor")][-1:]
        trees |= {name: last[0] for name in trees if name.endswith("factor")}
        return made(trees, trees.values(), change)

    monkeypatch.setattr(edits, "on_parts", confused)
    shifted = lambda *x: run(*x)._replace(logits=run(*x).logits + 1)  # noqa: E731
    monkeypatch.setattr(model_runs, "run_edited", shifted)
    measured, other = subject(*APART)
    measured = measured._replace(model=measured.model._replace(description=call))
    with pytest.raises(ValueError, match=r"\d off|% off"):
        CALLS[call](measured, other)
