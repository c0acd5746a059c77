"""The residual stream and norms, found in programs that have no sites.

B examples, T positions, D width, H heads, L layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import sites

B, T, D, H, L = 2, 5, 12, 3, 2
X = np.float32(np.random.default_rng(0).standard_normal((B, T, D)))


def _params():
    generator = np.random.default_rng(1)
    normal = lambda *shape: np.float32(generator.standard_normal(shape) / D**0.5)  # noqa: E731
    return {name: normal(L, D, D) for name in "qkvoab"} | {"u": normal(D, 7)}


def attend(p, x):
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], H, -1) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ p["o"]


def feed(p, x):
    return jax.nn.gelu(x @ p["a"]) @ p["b"]


def rms(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def standard(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)


def pre(p, x, norm=rms):
    x = x + attend(p, norm(x))
    return x + feed(p, norm(x))


def post(p, x):
    x = rms(x + attend(p, x))
    return rms(x + feed(p, x))


def in_parallel(p, x):
    y = rms(x)
    return x + (attend(p, y) + feed(p, y))


def in_parallel_one_by_one(p, x):
    y = rms(x)
    return (x + attend(p, y)) + feed(p, y)


def scaled(p, x):
    x = 0.5 * x + attend(p, rms(x))
    return x + 0.3 * feed(p, rms(x))


def nested(p, x):
    x = x + attend(p, rms(x))
    y = rms(x)
    y = y + feed(p, y)  # no part of the stream
    return x + y @ p["a"]


def nested_as_it_is(p, x):
    x = x + attend(p, rms(x))
    y = rms(x) @ p["a"]
    return x + (y + feed(p, y))  # a sum that is made of the stream and added to it


def projected(p, x):
    x = x + attend(p, rms(x))
    return (x + feed(p, rms(x))) @ p["a"]


def squashed(p, x):
    return jnp.tanh(attend(p, x))


def looped(layer, params, x):
    for i in range(L):
        with jax.named_scope(f"block_{i}"):
            x = layer({name: params[name][i] for name in "qkvoab"}, x)
    return x


def scanned(layer, params, x):
    stacked = {name: params[name] for name in "qkvoab"}
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, stacked)[0]


def _model(layer, stack=looped):
    """Makes a function whose embedding is what is given, twice."""
    return lambda params, x: rms(stack(layer, params, x * 2)) @ params["u"]


def _seen(function):
    """Returns the values of all sites outside attention, by name."""
    shown = sites.show_stream(function)
    output, found = sites.look(shown, ["*"])(_params(), X)
    np.testing.assert_allclose(output, function(_params(), X), atol=1e-5)
    own = {"query", "key", "value", "weights", "map", "heads"}
    return {n: x for n, x in found.items() if n.rpartition("/")[2] not in own}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "stack"),
    [
        (pre, looped),
        (functools.partial(pre, norm=standard), looped),
        (scaled, looped),
        (nested, looped),
        (jax.jit(pre), looped),
        (jax.checkpoint(pre), looped),
        (pre, scanned),
        (jax.checkpoint(pre), scanned),
    ],
)
def test_stream_is_what_enters_each_layer_and_leaves_the_last(layer, stack):
    params = _params()
    found = _seen(_model(layer, stack))
    streams = [x for name, x in found.items() if name.endswith("stream")]
    x, expected = jnp.float32(X * 2), []
    for i in range(L):
        expected.append(x)
        x = layer({name: params[name][i] for name in "qkvoab"}, x)
    assert len(streams) == L + 1
    for own, wanted in zip(streams, [*expected, x], strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    terms = [x for name, x in found.items() if name.endswith("feed_forward/output")]
    assert len(terms) == L
    np.testing.assert_allclose(found["embedding"], X * 2)
    factors = [name for name in found if "factor" in name]
    assert len(factors) == 2 * L + 1


@pytest.mark.parametrize("layer", [in_parallel, in_parallel_one_by_one])
def test_terms_beside_attention_are_known_apart(layer):
    found = _seen(_model(layer))
    terms = [x for name, x in found.items() if name.endswith("feed_forward/output")]
    params = _params()
    p = {name: params[name][0] for name in "qkvoab"}
    assert len(terms) == L
    np.testing.assert_allclose(terms[0], feed(p, rms(jnp.float32(X * 2))), atol=1e-5)
    assert sum(name.endswith("stream") for name in found) == L + 1


@pytest.mark.parametrize("layer", [nested, nested_as_it_is])
def test_sums_inside_of_a_term_are_no_streams_and_all_terms_add_up(layer):
    shown = sites.show_stream(_model(layer))
    _, found = sites.look(shown, ["*"])(_params(), X)
    streams = [x for name, x in found.items() if name.endswith("stream")]
    assert len(streams) == L + 1
    for i in range(L):
        heads = found[f"block_{i}/heads"].reshape(X.shape)
        own = f"block_{i}/feed_forward"  # of two terms in a layer, with a number
        terms = [x for name, x in found.items() if name.startswith(own)]
        total = streams[i] + heads @ _params()["o"][i] + sum(terms)
        np.testing.assert_allclose(total, streams[i + 1], atol=1e-4)


@pytest.mark.parametrize("layer", [post, projected])
def test_what_is_done_to_the_sum_breaks_the_stream_and_not_its_terms(layer):
    found = _seen(_model(layer))
    assert not [name for name in found if name.endswith("stream")]
    assert "embedding" in found
    assert sum(name.endswith("feed_forward/output") for name in found) == L


def test_products_of_experts_are_a_term():
    def routed(params, x):
        sizes = jnp.array([4, B * T - 4])
        x = x * 2
        y = jax.lax.ragged_dot(rms(x).reshape(-1, D), params["a"], sizes)
        return x + y.reshape(x.shape)

    found, x = _seen(routed), jnp.float32(X * 2)
    (term,) = (x for name, x in found.items() if name.endswith("feed_forward/output"))
    np.testing.assert_allclose(term, routed(_params(), X) - x, atol=1e-5)


def test_what_is_no_residual_sum_has_no_stream():
    assert not [n for n in _seen(_model(squashed)) if not n.endswith("factor")]


def test_factor_is_what_a_norm_multiplies_by():
    for norm in (rms, standard):
        found = _seen(_model(functools.partial(pre, norm=norm)))
        x = np.float64(X * 2)
        x = x - x.mean(-1, keepdims=True) if norm is standard else x
        expected = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        first = next(name for name in found if "factor" in name)
        np.testing.assert_allclose(found[first], expected, rtol=1e-5)
        shown = sites.show_stream(_model(functools.partial(pre, norm=norm)))
        doubled = sites.edit(shown, {"factor": lambda x: 2 * x})(_params(), X)
        output = shown(_params(), X)
        assert np.abs(doubled - output).max() > 0.1


def test_sites_of_the_program_are_not_named_twice():
    def named(params, x):
        x = sites.site("embedding", x * 2)
        factor = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        y = x * sites.site("factor", factor)
        p = {name: params[name][0] for name in "qkvoab"}
        x = x + attend(p, y)
        x = x + sites.site("feed_forward/output", feed(p, x))
        return x @ params["u"]

    names = [*_seen(named)]
    for name in ("embedding", "factor", "feed_forward/output"):
        assert sum(each.endswith(name) for each in names) == 1


def test_a_changed_stream_reaches_all_that_follows():
    shown = sites.show_stream(_model(pre))
    _, found = sites.look(shown, ["stream"])(_params(), X)
    last = next(reversed(found))
    names = [*found]
    assert names[:2] == ["block_0/stream", "block_1/stream"]
    first = found["block_0/stream"]
    output = sites.edit(shown, {last: lambda _: first})(_params(), X)
    np.testing.assert_allclose(output, rms(first) @ _params()["u"], atol=1e-5)
    entered = {"block_1/stream": lambda _: first}
    output = sites.edit(shown, entered)(_params(), X)
    x = pre({name: _params()[name][1] for name in "qkvoab"}, first)
    np.testing.assert_allclose(output, rms(x) @ _params()["u"], atol=1e-5)
