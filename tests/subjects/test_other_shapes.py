"""Functions that arrange their arrays otherwise have the numbers of the plain one.

One text may lose the axis of examples in attention (heads are folded into the batch, or
rows run alone), a feed-forward part may join the axes of examples and positions, and a
norm may be written otherwise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from tests import everyday
from tests.subjects.test_subject import Letters

B, T, H, D, V, L = 1, 6, 2, 8, 11, 2
TOKENS, OTHER = np.array([[1, 5, 3, 7, 2, 4]]), np.array([[1, 6, 3, 7, 2, 4]])


@pytest.fixture(scope="module")
def params():
    shapes = {"embedding": (V, D), "positions": (T, D)}
    for i in range(L):
        shapes |= {f"{name}{i}": (D, D) for name in "qkvo"}
        shapes |= {f"up{i}": (D, 4 * D), f"down{i}": (4 * D, D)}
    rng = np.random.default_rng(0)
    return {x: jnp.float32(rng.normal(size=y) / y[0] ** 0.5) for x, y in shapes.items()}


def _norm(x, bound):
    variance = bound(x.var(-1, keepdims=True))
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5)


def _mix(q, k, v):
    """Attends, of heads in the first axes."""
    seen = jnp.tril(jnp.ones((T, T), bool)).reshape((1,) * (q.ndim - 2) + (T, T))
    scores = jnp.where(seen, q @ k.swapaxes(-1, -2), -1e9)
    return jax.nn.softmax(scores) @ v


def _attention(params, i, x, folds):
    q, k, v = (
        (x @ params[f"{name}{i}"]).reshape(*x.shape[:-1], H, -1) for name in "qkv"
    )
    q, k, v = (y.swapaxes(-2, -3) for y in (q, k, v))
    if folds:  # as in BLOOM, and with positions in DeBERTa
        q, k, v = (y.reshape(-1, *y.shape[-2:]) for y in (q, k, v))
    heads = _mix(q, k, v).reshape(*x.shape[:-2], H, T, -1)
    return heads.swapaxes(-2, -3).reshape(x.shape) @ params[f"o{i}"]


def model(params, tokens, folds=False, joins=False, bound=lambda x: x):
    positions = params["positions"].reshape((1,) * (tokens.ndim - 1) + (T, D))
    x = params["embedding"][tokens] + positions
    for i in range(L):
        with jax.named_scope(f"block_{i}"):
            x = x + _attention(params, i, _norm(x, bound), folds)
            shape = x.shape
            x = x.reshape(-1, D) if joins else x  # as in OPT
            hidden = jax.nn.relu(_norm(x, bound) @ params[f"up{i}"])
            x = (x + hidden @ params[f"down{i}"]).reshape(shape)
    return _norm(x, bound) @ params["embedding"].T


FUNCTIONS = {
    "heads folded into the batch": functools.partial(model, folds=True),
    "a stack of rows": lambda params, x: jnp.stack([model(params, row) for row in x]),
    "vmap of a row with folded heads": lambda params, x: jax.vmap(
        lambda row: model(params, row, folds=True)
    )(x),
    "positions joined": functools.partial(model, joins=True),
    "a bounded variance": functools.partial(model, bound=lambda x: jnp.maximum(0.0, x)),
    "a variance in an interval": functools.partial(
        model, bound=lambda x: jnp.clip(x, 0.0, 1e6)
    ),
}


def _why_on_page(subject):
    (cells,) = subject.maps(TOKENS, why=1).why
    return {part: np.abs(terms).sum(-1) for part, terms in cells.terms.items()}


QUESTIONS = {
    "why": lambda x: np.abs(x.why(TOKENS, layer=1, head=1, query=4).terms).max(),
    "show": _why_on_page,
    "writes": lambda x: x.writes(TOKENS, layer=1, head=0, answer=3).terms.sum(1),
    "reads": lambda x: np.nansum(x.reads(TOKENS).mean("k"), -1),
    "lens": lambda x: x.lens(TOKENS).logits,
    "statistics": lambda x: x.statistics(TOKENS)["entropy"].mean,
    "roles": lambda x: x.roles(TOKENS)["offset"].mean,
    "strongest": lambda x: x.strongest(1, 1, TOKENS, count=1).weights,
    "circuit": lambda x: x.circuit(TOKENS, OTHER, answers=(1, 2), edges=3).only,
    "paths": lambda x: x.paths(TOKENS, OTHER, answers=(1, 2)).mean,
    "importance": lambda x: x.importance("ablation", TOKENS).mean,
    "attribution": lambda x: (
        mh.heads.logit_attribution(
            x.model, x.params, x.measured(TOKENS).batches[0]
        ).heads
    ),
}
EVERYDAY = [
    *(("heads folded into the batch", x) for x in ("why", "statistics", "strongest")),
    ("positions joined", "writes"),
    ("positions joined", "lens"),
    ("a bounded variance", "why"),
]


@pytest.fixture(scope="module")
def expected(params):
    plain = mh.wrap(model, params)
    return functools.cache(lambda question: QUESTIONS[question](plain))


@pytest.mark.parametrize(
    ("name", "question"),
    everyday.those([(x, y) for x in FUNCTIONS for y in QUESTIONS], *EVERYDAY),
)
def test_the_numbers_are_those_of_the_plain_function(params, expected, name, question):
    found = QUESTIONS[question](mh.wrap(FUNCTIONS[name], params))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
    jax.tree.map(close, found, expected(question))


def test_an_answer_at_the_last_position_is_below_its_token(params):
    def of_last(params, tokens):
        return model(params, tokens)[:, -1:]

    whole = mh.wrap(model, params, Letters()).lens("abcdef")
    last = mh.wrap(of_last, params, Letters()).lens("abcdef")
    assert last.tokens == whole.tokens[-1:]
    assert last.texts.tolist() == whole.texts[:, -1:].tolist()


def test_a_map_takes_a_value_of_each_group_of_heads():
    shapes = (2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 6)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(x, y) for x, y in zip(keys, shapes, strict=True)]
    values, found = mh.attend(*arrays)
    np.testing.assert_allclose(found.apply(arrays[2]), values, rtol=1e-5, atol=1e-6)


def test_a_single_layer_has_no_compositions_and_says_so(params):
    config = mh.models.ModelConfig(num_layers=1, model_size=8)
    sizes = {"num_tokens": V, "feature_size": None, "num_classes": V}
    built = mh.models.build(config, **sizes)
    subject = mh.Subject(built, built.init(jax.random.key(0), TOKENS), "one layer")
    assert subject.compositions().text() == "There are no rows."
