"""Attention as others write it: what must be recognized, and what must not.

B batch, T query positions, S key positions, H query heads, G key heads, K and V sizes
per head, D model width: all different.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests import oracles

B, T, S, H, G, K, V, D = 2, 3, 5, 8, 4, 7, 6, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention from queries of `x` `[B, T, D]` to keys of `y` `[B, S, D]`.

    Attributes:
      function: From parameters, x and y to the output.
      params: The parameters.
      gated: From the parameters and gates `[H]` to the parameters of gated heads.
      unasked: From the parameters to those in which all queries are 0.
      expected: From parameters, x and y to the map, in float64 or by the library.
      name: What the sites' names begin with.
      num_heads: H.
      tolerance: Of the map.
      inputs: x and y.
    """

    function: Callable
    params: Any
    gated: Callable
    unasked: Callable
    expected: Callable
    name: str = "attention_0"
    num_heads: int = H
    num_key_heads: int = H
    sums_to_one: bool = True
    tolerance: float = 3e-6
    inputs: tuple = (
        jax.random.normal(jax.random.key(1), (B, T, D)),
        jax.random.normal(jax.random.key(2), (B, S, D)),
    )

    @property
    def arguments(self):
        """The function's arguments."""
        return self.params, *self.inputs


CASES: dict[str, Callable[[], Case]] = {}


def _case(function):
    CASES[function.__name__.strip("_")] = functools.cache(function)
    return function


# --- Written by hand; test_random_attention.py draws more ways to write the same


def _params(num_heads=H, num_key_heads=H, value_size=V):
    shapes = {
        "query": (D, num_heads, K),
        "key": (D, num_key_heads, K),
        "value": (D, num_key_heads, value_size),
        "output": (num_heads, value_size, D),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) / 3
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def _operands(params, x, y):
    return (
        jnp.einsum("btd,dhk->bthk", x, params["query"]),
        jnp.einsum("bsd,dgk->bsgk", y, params["key"]),
        jnp.einsum("bsd,dgv->bsgv", y, params["value"]),
    )


def _by_hand(attend, expected=None, num_key_heads=H, value_size=V, **known):
    """Returns the case of a function of queries, keys and values."""

    def function(params, x, y):
        heads = attend(*_operands(params, x, y))
        return jnp.einsum("bthv,hvd->btd", heads, params["output"])

    def gated(params, gates):
        return params | {"output": params["output"] * gates[:, None, None]}

    def unasked(params):
        return params | {"query": jnp.zeros_like(params["query"])}

    def reference(params, x, y):
        names = ("query", "key", "value")
        projections = [np.asarray(params[name], np.float64) for name in names]
        x, y = (np.asarray(each, np.float64) for each in (x, y))
        operands = [
            np.einsum("bsd,dhk->bshk", each, projection)
            for each, projection in zip((x, y, y), projections, strict=True)
        ]
        return (expected or _softmax)(*operands)

    params = _params(known.get("num_heads", H), num_key_heads, value_size)
    return Case(
        function,
        params,
        gated,
        unasked,
        reference,
        num_key_heads=num_key_heads,
        **known,
    )


def _softmax(query, key, value, **options):
    return oracles.attention(query, key, value, **options).weights


def _scores(query, key):
    return jnp.einsum("bthk,bshk->bhts", query, key) / np.sqrt(K)


def _values(weights, value):
    return jnp.einsum("bhts,bshv->bthv", weights, value)


@_case
def plain():
    return _by_hand(lambda q, k, v: _values(jax.nn.softmax(_scores(q, k)), v))


@_case
def products_of_matrices():
    def attend(query, key, value):
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        scores = query @ jnp.swapaxes(key, 2, 3) / np.sqrt(K)
        return jnp.swapaxes(jax.nn.softmax(scores) @ value, 1, 2)

    return _by_hand(attend)


@_case
def powers_of_two():
    def attend(query, key, value):
        scores = _scores(query, key) * np.log2(np.e)
        powers = jnp.exp2(scores - scores.max(-1, keepdims=True))
        return _values(powers / powers.sum(-1, keepdims=True), value)

    return _by_hand(attend)


@_case
def exponential_of_log_softmax():
    return _by_hand(
        lambda q, k, v: _values(jnp.exp(jax.nn.log_softmax(_scores(q, k))), v)
    )


_ALLOWED = np.random.default_rng(0).random((B, 1, T, S)) < 0.6
_ALLOWED[..., 0] = True


@_case
def softmax_where_with_a_fully_masked_row():
    allowed = _ALLOWED.copy()
    allowed[1, 0, 2] = False

    def attend(query, key, value):
        where = jnp.broadcast_to(jnp.asarray(allowed), (B, H, T, S))
        return _values(jax.nn.softmax(_scores(query, key), where=where), value)

    expected = functools.partial(_softmax, allowed=allowed)
    return _by_hand(attend, expected, sums_to_one=False)


@_case
def soft_cap():
    def attend(query, key, value):
        return _values(jax.nn.softmax(2 * jnp.tanh(_scores(query, key) / 2)), value)

    score = functools.partial(oracles.dot_product, soft_cap=2.0)
    return _by_hand(attend, functools.partial(_softmax, score=score))


@_case
def bfloat16_with_float32_softmax():
    def attend(query, key, value):
        query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
        weights = jax.nn.softmax(_scores(query, key).astype(jnp.float32))
        return _values(weights.astype(jnp.bfloat16), value).astype(jnp.float32)

    return _by_hand(attend, tolerance=3e-2)


@_case
def dropout_of_weights():
    kept = np.random.default_rng(0).random((B, H, T, S)) < 0.8

    def attend(query, key, value):
        weights = jax.nn.softmax(_scores(query, key))
        return _values(jnp.where(jnp.asarray(kept), weights / 0.8, 0), value)

    return _by_hand(attend)


@_case
def random_dropout_of_weights():
    def attend(query, key, value):
        weights = jax.nn.softmax(_scores(query, key))
        kept = jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape)
        return _values(weights * kept.astype(weights.dtype) / 0.8, value)

    return _by_hand(attend)


_SINKS = np.linspace(-1, 1, H).astype(np.float32)


@_case
def sink_in_the_sum():
    def attend(query, key, value):
        scores, sinks = _scores(query, key), jnp.asarray(_SINKS)[None, :, None, None]
        most = jnp.maximum(scores.max(-1, keepdims=True), sinks)
        masses = jnp.exp(scores - most)
        total = masses.sum(-1, keepdims=True) + jnp.exp(sinks - most)
        return _values(masses / total, value)

    expected = functools.partial(_softmax, sinks=_SINKS)
    return _by_hand(attend, expected, sums_to_one=False)


@_case
def sink_as_a_column():
    def attend(query, key, value):
        sinks = jnp.asarray(_SINKS)[None, :, None, None]
        scores = _scores(query, key)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))
        return _values(weights[..., :-1], value)

    expected = functools.partial(_softmax, sinks=_SINKS)
    return _by_hand(attend, expected, sums_to_one=False)


@_case
def talking_heads():
    before, after = np.random.default_rng(0).normal(size=(2, H, H)) / 3

    def attend(query, key, value):
        scores = jnp.einsum("bhts,hg->bgts", _scores(query, key), jnp.float32(before))
        weights = jax.nn.softmax(scores)
        return _values(jnp.einsum("bhts,hg->bgts", weights, jnp.float32(after)), value)

    def expected(query, key, value):
        scores = np.einsum("bthk,bshk,hg->bgts", query, key, before) / np.sqrt(K)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        return np.einsum("bhts,hg->bgts", weights, after)

    return _by_hand(attend, expected, sums_to_one=False)


@_case
def sigmoid():
    return _by_hand(
        lambda q, k, v: _values(jax.nn.sigmoid(_scores(q, k) - 1), v),
        functools.partial(
            _softmax,
            score=functools.partial(oracles.log_sigmoid, offset=-1),
            is_normalized=False,
        ),
        sums_to_one=False,
    )


@_case
def sigmoid_by_hand():
    return _by_hand(
        lambda q, k, v: _values(1 / (1 + jnp.exp(-_scores(q, k))), v),
        functools.partial(_softmax, score=oracles.log_sigmoid, is_normalized=False),
        sums_to_one=False,
    )


@_case
def summed_heads():
    case = _by_hand(lambda q, k, v: _values(jax.nn.softmax(_scores(q, k)), v))

    def function(params, x, y):
        def head(query, key, value, output):
            query, key, value = (
                each @ matrix for each, matrix in ((x, query), (y, key), (y, value))
            )
            scores = query @ jnp.swapaxes(key, 1, 2) / np.sqrt(K)
            return jax.nn.softmax(scores) @ value @ output

        params = [params[name] for name in ("query", "key", "value", "output")]
        return jax.vmap(head, in_axes=(1, 1, 1, 0))(*params).sum(0)

    return dataclasses.replace(case, function=function)


@_case
def one_head():
    def attend(query, key, value):
        query, key, value = (x[:, :, 0] for x in (query, key, value))
        scores = query @ jnp.swapaxes(key, 1, 2) / np.sqrt(K)
        return (jax.nn.softmax(scores) @ value)[:, :, None]

    return _by_hand(attend, num_heads=1, num_key_heads=1)


# --- Libraries


def _jax_nn(expected=None, num_key_heads=H, **options):
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    return _by_hand(attend, expected, num_key_heads, value_size=K)


@_case
def jax_nn():
    return _jax_nn()


@_case
def jax_nn_grouped_heads():
    return _jax_nn(num_key_heads=G)


@_case
def jax_nn_mask():
    allowed = np.broadcast_to(_ALLOWED, (B, H, T, S))
    return _jax_nn(
        functools.partial(_softmax, allowed=allowed), mask=jnp.asarray(allowed)
    )


@_case
def jax_nn_causal():
    allowed = np.tri(T, S, dtype=bool)
    return _jax_nn(functools.partial(_softmax, allowed=allowed), is_causal=True)


@_case
def linen():
    module = flax.linen.MultiHeadDotProductAttention(H)
    params = module.init(jax.random.key(0), *Case.inputs)

    def changed(params, name, factor):
        layer = jax.tree.map(lambda x: x * factor, params["params"][name])
        return {"params": params["params"] | {name: layer}}

    def gated(params, gates):
        kernel = params["params"]["out"]["kernel"] * gates[:, None, None]
        out = params["params"]["out"] | {"kernel": kernel}
        return {"params": params["params"] | {"out": out}}

    def sown(params, x, y):
        _, state = module.apply(
            params, x, y, sow_weights=True, mutable=["intermediates"]
        )
        return state["intermediates"]["attention_weights"][0]

    return Case(
        module.apply,
        params,
        gated,
        lambda params: changed(params, "query", 0),
        sown,
        name="MultiHeadDotProductAttention",
    )


def _from_kernels(kernels):
    """Returns the map that kernels `[D, H, K]` of queries and keys give."""

    def expected(params, x, y):
        query, key = (np.asarray(each, np.float64) for each in kernels(params))
        query = np.einsum("btd,dhk->bthk", x, query)
        key = np.einsum("bsd,dhk->bshk", y, key)
        return _softmax(query, key, key)

    return expected


def _nnx(wrap=lambda function: function):
    module = flax.nnx.MultiHeadAttention(H, D, decode=False, rngs=flax.nnx.Rngs(0))
    graph, params = flax.nnx.split(module)

    def function(params, *x):
        module = flax.nnx.merge(graph, params)
        return wrap(lambda module, *x: module(*x))(module, *x)

    def changed(params, name, factor):
        return jax.tree.map_with_path(
            lambda path, leaf: (
                leaf * factor if {name, "kernel"} <= {x.key for x in path[:2]} else leaf
            ),
            params,
        )

    return Case(
        function,
        params,
        lambda params, gates: changed(params, "out", gates[:, None, None]),
        lambda params: changed(params, "query", 0),
        _from_kernels(
            lambda params: (params["query"]["kernel"], params["key"]["kernel"])
        ),
    )


@_case
def nnx():
    return _nnx()


@_case
def nnx_jit():
    return _nnx(flax.nnx.jit)


@_case
def equinox_under_vmap():
    module = equinox.nn.MultiheadAttention(H, D, key=jax.random.key(0))
    params, static = equinox.partition(module, equinox.is_array)

    def function(params, x, y, z=None):
        return jax.vmap(equinox.combine(params, static))(x, y, y if z is None else z)

    def changed(params, name, factor):
        return equinox.tree_at(
            lambda x: getattr(x, name).weight, params, replace_fn=lambda x: x * factor
        )

    return Case(
        function,
        params,
        lambda params, x: changed(params, "output_proj", jnp.repeat(x, D // H)[None]),
        lambda params: changed(params, "query_proj", 0),
        _from_kernels(
            lambda params: (
                each.weight.T.reshape(D, H, -1)
                for each in (params.query_proj, params.key_proj)
            )
        ),
        name="eqx.nn.MultiheadAttention",
    )


def _haiku(wrap=lambda function: function):
    def attend(x, *y):  # keys and values of one input, or of two
        module = hk.MultiHeadAttention(
            H, K, value_size=V, model_size=D, w_init=hk.initializers.VarianceScaling()
        )
        return wrap(lambda x, *y: module(x, y[0], y[-1]))(x, *y)

    model = hk.without_apply_rng(hk.transform(attend))
    params = model.init(jax.random.key(0), *Case.inputs)

    def changed(params, name, factor):
        name = f"multi_head_attention/{name}"
        return params | {name: params[name] | {"w": params[name]["w"] * factor}}

    return Case(
        model.apply,
        params,
        lambda params, x: changed(params, "linear", jnp.repeat(x, V)[:, None]),
        lambda params: changed(params, "query", 0),
        _from_kernels(
            lambda params: (
                params[f"multi_head_attention/{name}"]["w"].reshape(D, H, K)
                for name in ("query", "key")
            )
        ),
        name="multi_head_attention",
    )


@_case
def haiku():
    return _haiku()


@_case
def haiku_remat():
    return _haiku(hk.remat)


# --- Softmax and sigmoid that are no attention, or not in a form that is recognized


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


_TOKENS = _normal(0, T, D)
_EXPERTS = S

OTHERS = {
    "classifier": (lambda x, w: jax.nn.softmax(x @ w), _TOKENS, _normal(1, D, S)),
    "classifier whose probabilities are averaged": (
        lambda x, w, u: jax.nn.softmax(jnp.tanh(x @ w) @ u).mean(0) @ u.T,
        *(_TOKENS, _normal(1, D, K), _normal(2, K, S)),
    ),
    "two layers with a softmax between": (
        lambda x, w, u: jax.nn.softmax(x @ w) @ u,
        *(_TOKENS, _normal(1, D, S), _normal(2, S, D)),
    ),
    "router of a dense mixture of experts": (
        lambda x, w, u: jnp.einsum(
            "te,etd->td", jax.nn.softmax(x @ w), jnp.einsum("tc,ecd->etd", x, u)
        ),
        *(_TOKENS, _normal(1, D, _EXPERTS), _normal(2, _EXPERTS, D, D)),
    ),
    "router with dispatch and combine": (
        lambda x, w, u: jnp.einsum(
            "tec,ecd->td",
            jax.nn.softmax(x @ w)[:, :, None] * jnp.ones((T, _EXPERTS, 2)),
            jnp.einsum("tec,td,edf->ecf", jnp.ones((T, _EXPERTS, 2)), x, u),
        ),
        *(_TOKENS, _normal(1, D, _EXPERTS), _normal(2, _EXPERTS, D, D)),
    ),
    "expected embedding": (
        lambda x, w, codes: jax.nn.softmax(jnp.tanh(x @ w) @ codes.T) @ codes,
        *(_TOKENS, _normal(1, D, D), _normal(2, S, D)),
    ),
    "expected embedding of an input": (
        lambda x, codes: jax.nn.softmax(x @ codes.T) @ codes,
        *(_TOKENS, _normal(2, S, D)),
    ),
    "tied embedding and expected embedding": (
        lambda ids, w, codes: (
            jax.nn.softmax(jnp.tanh(codes[ids] @ w) @ codes.T) @ codes
        ),
        *(jnp.arange(T), _normal(1, D, D), _normal(2, S, D)),
    ),
    "Gumbel softmax over a codebook": (
        lambda x, w, codes: (
            jax.nn.softmax(
                jnp.tanh(x @ w) @ codes.T + jax.random.gumbel(jax.random.key(0), (T, S))
            )
            @ codes
        ),
        *(_TOKENS, _normal(1, D, D), _normal(2, S, D)),
    ),
    "contrastive loss": (
        lambda x, y, w: -jnp.trace(jax.nn.log_softmax((x @ w) @ (y @ w).T)),
        *(_TOKENS, _TOKENS + 1, _normal(1, D, D)),
    ),
    "nearest neighbors": (
        lambda x, y, w, labels: jax.nn.softmax((x @ w) @ (y @ w).T) @ labels,
        *(_TOKENS, _normal(3, S, D), _normal(1, D, D), jnp.eye(S)),
    ),
    "gated feed-forward layer": (
        lambda x, w, u, v: (jax.nn.sigmoid(x @ w) * (x @ u)) @ v,
        *(_TOKENS, _normal(1, D, S), _normal(2, D, S), _normal(3, S, D)),
    ),
    "gated feed-forward layer with low-rank weights": (
        lambda x, w, u, v, a, b: (
            (jax.nn.sigmoid(x @ (w + a @ b)) * (x @ u)) @ (v + b.T @ a.T)
        ),
        *(_TOKENS, _normal(1, D, S), _normal(2, D, S), _normal(3, S, D)),
        *(_normal(4, D, 2), _normal(5, 2, S)),
    ),
    "feed-forward layer with a sigmoid and low-rank weights": (
        lambda x, w, v, a, b, c, d: jax.nn.sigmoid(x @ (w + a @ b)) @ (v + c @ d),
        *(_TOKENS, _normal(1, D, S), _normal(3, S, D)),
        *(_normal(4, D, 2), _normal(5, 2, S), _normal(6, S, 2), _normal(7, 2, D)),
    ),
    "feed-forward layer with sigmoids": (
        lambda x, w, u, v: jax.nn.sigmoid(x @ w @ u) @ v,
        *(_TOKENS, _normal(1, D, D), _normal(2, D, S), _normal(3, S, D)),
    ),
    "feed-forward layer with swish": (
        lambda x, w, v: jax.nn.silu(x @ w) @ v,
        *(_TOKENS, _normal(1, D, S), _normal(3, S, D)),
    ),
    "pooling by a query of parameters": (
        lambda x, w, query: jax.nn.softmax((x @ w) @ query) @ (x @ w),
        *(_TOKENS, _normal(1, D, K), _normal(2, K)),
    ),
    "additive attention": (
        lambda x, y, w: (
            jax.nn.softmax(jnp.tanh((x @ w)[:, None] + (y @ w)[None]).sum(-1)) @ (y @ w)
        ),
        *(_TOKENS, _normal(3, S, D), _normal(1, D, K)),
    ),
    "division after the product": (
        lambda x, w: (
            (jnp.exp((x @ w) @ (x @ w).T) @ (x @ w))
            / jnp.exp((x @ w) @ (x @ w).T).sum(-1, keepdims=True)
        ),
        *(_TOKENS, _normal(1, D, K)),
    ),
    "difference of two softmaxes": (
        lambda x, w, u: (
            (jax.nn.softmax((x @ w) @ (x @ w).T) - jax.nn.softmax((x @ u) @ (x @ u).T))
            @ (x @ w)
        ),
        *(_TOKENS, _normal(1, D, K), _normal(2, D, K)),
    ),
    "exponentials over the sum of others": (
        lambda x, w: (
            jnp.exp(
                (x @ w) @ (x @ w).T - jax.nn.logsumexp(x @ (x @ w @ w.T).T, -1)[:, None]
            )
            @ (x @ w)
        ),
        *(_TOKENS, _normal(1, D, K)),
    ),
    "keys and values from elsewhere": (
        lambda x, w, key, value: jax.nn.softmax((x @ w) @ key.T) @ value,
        *(_TOKENS, _normal(1, D, K), _normal(2, S, K), _normal(3, S, V)),
    ),
}
