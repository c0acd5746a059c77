"""Functions in blocks of queries are the same functions, without their large values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku.core.sites import jaxprs, regions
from tests import everyday
from tests.core.sites.test_random_attention import Program

H, T, K, V, N, L = 2, 109, 3, 4, 131, 2  # 109 has no divisors: the last block overlaps
LIMIT = 4 * H * T * T // 8  # bytes


def shapes(closed: Any) -> Iterator[tuple[str, tuple]]:
    """Yields the shape of each value of a program as it is compiled."""
    for eqn in jaxprs.walk(closed.jaxpr, lambda eqn: eqn.primitive.name != "blockwise"):
        if eqn.primitive.name == "blockwise":
            closed, limit = eqn.params["jaxpr"], eqn.params["limit"]
            lowered = jax.make_jaxpr(
                lambda *inputs, closed=closed, limit=limit: regions.run(
                    closed, list(inputs), limit
                )
            )
            yield from shapes(lowered(*closed.in_avals))
        else:
            yield from (
                (eqn.primitive.name, getattr(x.aval, "shape", ())) for x in eqn.outvars
            )


def large(function: Callable, *arguments: Any, area: int = T * T) -> set:
    """Finds values with all queries and all keys in a program as it is compiled."""
    closed = jax.make_jaxpr(function)(*arguments)
    return {x for x in shapes(closed) if np.prod(x[1]) >= area // 2}


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    def same(found, expected):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if jnp.issubdtype(expected.dtype, jnp.inexact):
            scale = np.abs(np.nan_to_num(expected)).max(initial=1e-30)
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(found, expected)

    jax.tree.map(same, found, expected)


# --- Attention by hand


def inputs() -> tuple[dict, dict]:
    """Returns what is differentiated, and other data."""
    rng = np.random.default_rng(0)
    sizes = dict(q=(H, T, K), k=(H, T, K), v=(H, T, V), x=(T, K), embedding=(K, N))
    sizes |= dict(sink=(H, 1, 1), mixing=(H, H), table=(32, H), slopes=(H, 1, 1))
    params = {name: jnp.asarray(rng.normal(size=x)) for name, x in sizes.items()}
    data = dict(
        allowed=jnp.asarray((rng.random((T, T)) < 0.7) | np.eye(T, dtype=bool)),
        bias=jnp.asarray(rng.normal(size=(T, T))),
        tokens=jnp.asarray(rng.integers(0, N, T)),
        key=jax.random.key(1),
    )
    return params, data


def product(params: dict) -> jax.Array:
    return jnp.einsum("htk,hsk->hts", params["q"], params["k"]) / np.sqrt(K)


def attended(params: dict, scores: jax.Array, **options: Any) -> jax.Array:
    return jax.nn.softmax(scores, **options) @ params["v"]


def distance() -> jax.Array:
    return jnp.arange(T)[:, None] - jnp.arange(T)


def causal(scores: jax.Array) -> jax.Array:
    return jnp.where(distance() >= 0, scores, -jnp.inf)


def windowed(params, data):
    allowed = (distance() >= 0) & (distance() < 9)
    return attended(params, jnp.where(allowed, product(params), -1e30))


def t5(params, data):
    buckets = jnp.clip(distance() + 16, 0, 31)
    bias = jnp.moveaxis(params["table"][buckets], -1, 0)
    return attended(params, product(params) + bias)


def difference(params, data):
    q, k = params["q"], params["k"]
    first, second = product(params), product(dict(params, q=q[::-1], k=k[::-1]))
    weights = jax.nn.softmax(causal(first)) - 0.5 * jax.nn.softmax(causal(second))
    return weights @ params["v"]


def talking_heads(params, data):
    mixed = jnp.einsum("hts,hg->gts", product(params), params["mixing"])
    weights = jax.nn.softmax(causal(mixed))
    return jnp.einsum("hts,hg->gts", weights, params["mixing"]) @ params["v"]


def sink(params, data):
    column = jnp.broadcast_to(params["sink"], (H, T, 1))
    scores = jnp.concatenate([causal(product(params)), column], -1)
    return jax.nn.softmax(scores)[..., :-1] @ params["v"]


def keys_first(params, data):
    scores = jnp.einsum("htk,hsk->hst", params["q"], params["k"])
    scores = jnp.moveaxis(scores, 0, -1)  # [S, T, H]
    scores = jnp.where((distance() <= 0)[..., None], scores, -1e30)
    return jnp.einsum("sth,hsv->thv", jax.nn.softmax(scores, 0), params["v"])


def slots(params, data):
    """A softmax over queries, whose weights are normalized over keys."""
    weights = jax.nn.softmax(product(params), 1)
    return weights / (weights.sum(-1, keepdims=True) + 1e-3) @ params["v"]


def loss(params, data):
    logits = params["q"][0] @ params["embedding"]
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), data["tokens"][:, None], -1
    )
    return -chosen.mean()


def accuracy(params, data):
    logits = params["q"][0] @ params["embedding"]
    return (logits.argmax(-1) == data["tokens"]).mean()


def scanned(params, data):
    allowed = (distance() >= 0) & data["allowed"]

    def layer(x, scale):
        scores = jnp.where(allowed, scale * (x @ jnp.swapaxes(x, 1, 2)), -1e30)
        return x + jax.nn.softmax(scores) @ x, scores.max(-1)

    return jax.lax.scan(layer, params["q"], jnp.arange(1, L + 1) / 3)


def rematerialized(params, data, **options):
    @functools.partial(jax.checkpoint, **options)
    def layer(x):
        scores = causal(product(dict(params, q=x)))
        return x + (jax.nn.softmax(scores) @ params["v"])[..., :K]

    return layer(layer(params["q"]))


def scanned_and_rematerialized(params, data):
    @jax.checkpoint
    def layer(x, scale):
        return x + jax.nn.softmax(causal(scale * product(dict(params, q=x)))) @ x, None

    return jax.lax.scan(layer, params["q"], jnp.arange(1, L + 1) / 3)[0]


def branched(params, data):
    return jax.lax.cond(
        params["sink"].sum() < 1e9,
        lambda: attended(params, causal(product(params))),
        lambda: params["v"] * 2,
    )


def mapped(params, data):
    def one(q, k, v):
        return jax.nn.softmax(jnp.where(data["allowed"], q @ k.T, -1e30)) @ v

    return jax.vmap(one)(params["q"], params["k"], params["v"])


def mapped_over_queries(params, data):
    def one(q, row):
        scores = jnp.where(row, params["k"][0] @ q, -1e30)
        return jax.nn.softmax(scores) @ params["v"][0]

    return jax.vmap(one)(params["q"][0], data["allowed"])


@jax.custom_vjp
def _surrogate(x):
    return jax.nn.sigmoid(x)


_surrogate.defvjp(
    lambda x: (_surrogate(x), x), lambda x, slope: (7 * slope * jnp.cos(x),)
)


@jax.custom_jvp
def _bent(x):
    return jnp.tanh(x)


@_bent.defjvp
def _bent_jvp(primals, tangents):
    return _bent(*primals), 5 * jnp.sin(primals[0]) * tangents[0]


def own_layer(params, data):
    """A layer with a gradient that is not its own."""

    @jax.custom_vjp
    def layer(params):
        return attended(params, causal(product(params)))

    def backward(params, slope):
        pulled = jax.vjp(lambda x: attended(x, product(x)), params)[1](slope)[0]
        return (jax.tree.map(lambda x: 3 * x, pulled),)

    layer.defvjp(lambda params: (layer(params), params), backward)
    return layer(params)


def short(params, data):
    params = {name: x.astype(jnp.bfloat16) for name, x in params.items()}
    scores = causal(product(params)).astype(jnp.float32)
    return jax.nn.softmax(scores).astype(jnp.bfloat16) @ params["v"]


def grouped(params, data):
    q = jnp.stack([params["q"], params["q"] * 2], 1)
    scores = causal(jnp.einsum("hgtk,hsk->hgts", q, params["k"]))
    return jnp.einsum("hgts,hsv->hgtv", jax.nn.softmax(scores), params["v"])


def dropout(params, data):
    weights = jax.nn.softmax(causal(product(params)))
    kept = jax.random.bernoulli(data["key"], 0.9, weights.shape)
    return jnp.where(kept, weights / 0.9, 0) @ params["v"]


def polynomial(params, data):
    scores = jnp.where(distance() >= 0, product(params), 0)
    weights = scores**4
    return weights @ params["v"] / (weights.sum(-1, keepdims=True) + 1)


def contextual_positions(params, data):
    gates = jnp.where(distance() >= 0, jax.nn.sigmoid(product(params)), 0)
    positions = jnp.cumsum(gates[..., ::-1], -1)[..., ::-1]
    return attended(params, causal(product(params) - positions))


def sparsemax(params, data):
    scores = product(params)
    ordered = jnp.sort(scores, -1)[..., ::-1]
    sums = jnp.cumsum(ordered, -1) - 1
    counts = jnp.arange(1, T + 1)
    size = (ordered * counts > sums).sum(-1, keepdims=True)
    threshold = jnp.take_along_axis(sums, size - 1, -1) / size
    return jnp.maximum(scores - threshold, 0) @ params["v"]


def best_keys(params, data):
    scores = product(params)
    least = jax.lax.top_k(scores, 4)[0][..., -1:]
    return attended(params, jnp.where(scores >= least, scores, -1e30))


def distances(params, data):
    q, k = params["q"], params["k"]
    squared = (q**2).sum(-1)[..., None] + (k**2).sum(-1)[:, None] - 2 * product(params)
    weights = jnp.exp(-squared)
    return weights @ params["v"] / weights.sum(-1, keepdims=True)


def two_products_of_weights(params, data):
    """Weights that values and keys are both read with, and their entropy."""
    weights = jax.nn.softmax(causal(product(params)))
    entropy = jax.scipy.special.entr(weights).sum(-1)
    received = weights.sum(1)
    return weights @ params["v"], weights @ params["k"], entropy, received


def pooled_rows(params, data):
    weights = jax.nn.softmax(causal(product(params)))
    return weights[:, : T - 1].reshape(H, 4, 27, T).mean(2)


def softmax_over_all(params, data):
    weights = jax.nn.softmax(product(params).reshape(H, -1)).reshape(H, T, T)
    return weights @ params["v"]


def nested(params, data):
    @jax.jit
    def attend(params):
        return mh.blockwise(jax.jit(windowed), limit=LIMIT)(params, data)

    return attend(params), attend(dict(params, q=2 * params["q"]))


def jax_nn(params, data):
    q, k, v = (jnp.moveaxis(params[name], 0, 1) for name in ("q", "k", "v"))
    return jax.nn.dot_product_attention(q, k, v[..., :K], is_causal=True)


CASES = {
    "causal": lambda params, data: attended(params, causal(product(params))),
    "window": windowed,
    "mask": lambda params, data: attended(
        params, product(params), where=data["allowed"][None]
    ),
    "bias": lambda params, data: attended(params, product(params) + data["bias"]),
    "soft cap": lambda params, data: attended(
        params, causal(5 * jnp.tanh(product(params) / 5))
    ),
    "alibi": lambda params, data: attended(
        params, causal(product(params) - params["slopes"] * jnp.abs(distance()))
    ),
    "t5": t5,
    "sigmoid": lambda params, data: (
        jax.nn.sigmoid(causal(product(params)) - np.log(T)) @ params["v"]
    ),
    "difference": difference,
    "talking heads": talking_heads,
    "sink": sink,
    "keys first": keys_first,
    "slots": slots,
    "loss": loss,
    "accuracy": accuracy,
    "scan": scanned,
    "remat": rematerialized,
    "remat that saves products": functools.partial(
        rematerialized,
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "scan and remat": scanned_and_rematerialized,
    "cond": branched,
    "vmap": mapped,
    "vmap over queries": mapped_over_queries,
    "custom vjp": lambda params, data: attended(params, _surrogate(product(params))),
    "custom jvp": lambda params, data: attended(params, _bent(product(params))),
    "layer with its own gradient": own_layer,
    "bfloat16": short,
    "grouped heads": grouped,
    "dropout": dropout,
    "polynomial": polynomial,
    "contextual positions": contextual_positions,
    "sparsemax": sparsemax,
    "best keys": best_keys,
    "distances": distances,
    "two products": two_products_of_weights,
    "pooled rows": pooled_rows,
    "softmax over all": softmax_over_all,
    "nested": nested,
    "jax.nn": jax_nn,
}


# What has to stay whole, and one of the values.
# Residuals of a loop or a branch that JAX has differentiated: `grad` goes outside.
WHOLE_OUTSIDE = {"scan": "scan", "cond": "cond"}
WHOLE = {
    "dropout": "random_bits",
    "pooled rows": "blocks",
    "softmax over all": "reshape",
}
TOLERANCES = {"bfloat16": 2e-2, "jax.nn": 1e-6}


@pytest.fixture
def wide():
    """Cases are in float64, and written in JAX as it is without options."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def total(function: Callable, data: dict) -> Callable:
    """Makes a number of all results of a function."""

    def of_params(params):
        outputs = jax.tree.leaves(function(params, data))
        weights = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in outputs]
        return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))

    return of_params


def in_blocks(function: Callable) -> Callable:
    return mh.blockwise(function, limit=LIMIT)


@pytest.mark.parametrize("name", everyday.some(CASES, 12))
def test_same_values_and_gradients_without_large_arrays(name, wide):
    function, (params, data) = CASES[name], inputs()
    plain, blocks = total(function, data), total(in_blocks(function), data)

    def expected(params):
        return function(params, data), jax.grad(plain)(params)

    def found(params):
        return in_blocks(function)(params, data), jax.grad(blocks)(params)

    def again(params):
        return function(params, data), in_blocks(jax.grad(blocks))(params)

    tolerance = TOLERANCES.get(name, 1e-12)
    wanted = jax.jit(expected)(params)
    close(jax.jit(found)(params), wanted, tolerance)
    close(jax.jit(in_blocks(expected))(params), wanted, tolerance)
    close(jax.jit(again)(params)[1], wanted[1], tolerance)
    for order, whole in ((found, WHOLE), (in_blocks(expected), WHOLE | WHOLE_OUTSIDE)):
        left = large(order, params)
        advice = mh.sites(order, params).advice.partition("Not computed in blocks:")[2]
        if name in whole:
            assert left
            assert f" of {whole[name]}" in advice
        else:
            assert not left
            assert not advice


@pytest.mark.parametrize(
    "name",
    everyday.those(
        ("causal", "t5", "scan", "scan and remat", "cond", "vmap", "custom jvp"),
        *("causal", "scan and remat"),
    ),
)
def test_composes_with_all_transformations(name, wide):
    function, (params, data) = CASES[name], inputs()
    tangents = jax.tree.map(jnp.cos, params)
    several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, -x]), params)

    def of(change):
        f = total(change(function), data)
        slope = jax.grad(f)
        return {
            "jvp": lambda: jax.jvp(f, (params,), (tangents,)),
            "forward over reverse": lambda: jax.jvp(slope, (params,), (tangents,))[1],
            "reverse over reverse": lambda: jax.grad(
                lambda x: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, slope(x), x)))
            )(params),
            "vmap": lambda: jax.vmap(functools.partial(change(function), data=data))(
                several
            ),
            "vmap of grad": lambda: jax.vmap(slope)(several),
            "grad of vmap": lambda: jax.grad(lambda x: jax.vmap(f)(x).sum())(several),
            "remat": lambda: jax.grad(jax.checkpoint(f))(params),
            "linearize": lambda: jax.linearize(f, params)[1](tangents),
            "scan": lambda: jax.lax.scan(lambda x, y: (x + f(y), ()), 0.0, several)[0],
        }

    expected = of(lambda f: f)
    for order, run in of(in_blocks).items():
        close(jax.jit(run)(), jax.jit(expected[order])(), 1e-10)
        assert not large(run), order


def test_linear_functions_are_transposed(wide):
    params, data = inputs()

    def linear(v):
        return attended(dict(params, v=v), causal(product(params)))

    slope = jnp.cos(params["v"])
    expected = jax.linear_transpose(linear, params["v"])(slope)
    found = jax.linear_transpose(in_blocks(linear), params["v"])
    close(found(slope), expected)
    assert not large(found, slope)


def layers(params, data):
    with jax.named_scope("layer"):
        scores = mh.site("all_scores", causal(product(params)))
        return jax.nn.softmax(scores) @ params["v"]


READS = {
    "layer/weights": lambda weights: jax.scipy.special.entr(weights).sum(-1),
    "*/all_scores": lambda scores: scores.max(-1),
    "layer/heads": lambda heads: heads,
}
EDITS = {"layer/weights": lambda weights: weights**2, "*/heads": lambda heads: -heads}


def test_values_are_read_and_changed_in_every_order(wide):
    params, data = inputs()
    look, edit = (
        functools.partial(mh.look, at=READS),
        functools.partial(mh.edit, edits=EDITS),
    )
    expected = jax.jit(look(layers))(params, data)
    assert set(expected[1]) == {"layer/weights", "layer/all_scores", "layer/heads"}
    for order in (
        look(in_blocks(layers)),
        in_blocks(look(layers)),
        in_blocks(look(in_blocks(layers))),
        look(jax.jit(in_blocks(layers))),
    ):
        close(jax.jit(order)(params, data), expected)
        assert not large(order, params, data)
    expected = jax.jit(jax.value_and_grad(total(edit(layers), data)))(params)
    unchanged = jax.jit(total(layers, data))(params)
    assert abs(expected[0] - unchanged) > 1e-3
    for order in (edit(in_blocks(layers)), in_blocks(edit(layers))):
        run = jax.value_and_grad(total(order, data))
        close(jax.jit(run)(params), expected)
        assert not large(run, params)


def test_values_are_read_in_programs_of_gradients(wide):
    params, data = inputs()
    names = {"*/all_scores": READS["*/all_scores"]}
    slope = jax.grad(total(layers, data))
    expected = jax.jit(mh.look(slope, names))(params)
    for order in (
        mh.look(jax.grad(total(in_blocks(layers), data)), names),
        mh.look(in_blocks(slope), names),
        in_blocks(mh.look(slope, names)),
    ):
        close(jax.jit(order)(params), expected)
        assert not large(order, params)


@pytest.mark.parametrize("seed", everyday.some([*range(300, 324)], 4))
def test_attention_at_random_is_the_same_in_blocks(seed):
    program, limit = Program(seed, (N, N)), 2 * N * N

    def slope(function):
        def number(params, x, y):
            return jnp.sum(function(params, x, y) ** 2)

        return jax.value_and_grad(number, (0, 1, 2))

    def changed(function):
        return mh.blockwise(function, limit=limit)

    reads = {"*/weights": lambda weights: weights.max(), "*/heads": lambda heads: heads}
    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.float64, program.arguments)
        for original, orders in (
            (slope(program), (slope(changed(program)), changed(slope(program)))),
            (
                mh.look(program, reads),
                (mh.look(changed(program), reads), changed(mh.look(program, reads))),
            ),
        ):
            expected = jax.jit(original)(*arguments)
            for order in orders:
                close(jax.jit(order)(*arguments), expected, 1e-10)
            # A loop that JAX has differentiated keeps the weights of all turns.
            for order in orders[: 1 if program.is_scan else 2]:
                assert not large(order, *arguments, area=2 * N * N)


# --- What is no attention


def test_functions_without_large_values_are_left_as_they_are():
    def small(x, n):
        return x * n, x.sum()

    x = jnp.ones((3, 4))
    plain = jax.make_jaxpr(small, static_argnums=1)(x, 2)
    assert str(jax.make_jaxpr(mh.blockwise(small), static_argnums=1)(x, 2)) == str(
        plain
    )


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


X = np.random.default_rng(0).normal(size=(T, K)).astype(np.float32)


def test_function_with_an_effect_keeps_it(capfd):
    def told(x):
        jax.debug.print("sum {}", x.sum().round())
        return attend(x)

    close(jax.jit(in_blocks(told))(X), attend(X), 1e-6)
    jax.effects_barrier()
    assert capfd.readouterr().out.startswith("sum ")


def test_arguments_and_results_may_be_anything():
    def function(x, activation, *, scale, names, steps):
        return (
            {"output": activation(scale * attend(x)), "names": names},
            steps + 1,
            None,
        )

    arguments = dict(scale=2, names=("a", "b"), steps=np.arange(3))
    expected = function(X, jnp.tanh, **arguments)
    found = in_blocks(function)(X, jnp.tanh, **arguments)
    assert found[0].pop("names") == expected[0].pop("names") and found[2] is None
    close(found[:2], jax.tree.map(jnp.asarray, expected[:2]), 1e-6)


def test_integers_take_part_and_have_no_gradient():
    def function(tokens, table):
        return attend(table[tokens]), tokens + 1

    tokens = np.arange(T) % 7
    found, pull, _ = jax.vjp(
        lambda table: (in_blocks(function)(tokens, table)[0], 0), X[:7], has_aux=True
    )
    expected, pull_plain = jax.vjp(lambda table: attend(table[tokens]), X[:7])
    close((found, pull(found)), (expected, pull_plain(expected)), 1e-5)
    slopes = jax.vjp(in_blocks(function), tokens, X[:7])[1](
        (expected, np.zeros(T, jax.dtypes.float0))
    )
    assert slopes[0].dtype == jax.dtypes.float0


def test_values_of_an_enclosing_trace_are_differentiated():
    def outer(w):
        def inner(x):
            return attend(x @ w).sum()

        return in_blocks(inner)(X)

    w = jnp.eye(K)
    close(jax.jit(jax.grad(outer))(w), jax.grad(lambda w: attend(X @ w).sum())(w), 1e-5)
    assert not large(jax.grad(outer), w)


def test_functions_of_haiku_keep_parameters_state_and_keys():
    def function(x):
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        noise = jax.random.normal(hk.next_rng_key(), x.shape)
        return attend(hk.Linear(K)(x) + noise)

    plain = hk.transform_with_state(function)
    blocks = hk.transform_with_state(in_blocks(function))
    key = jax.random.key(0)
    params, state = plain.init(key, X)
    close(blocks.init(key, X), (params, state), 1e-6)
    close(blocks.apply(params, state, key, X), plain.apply(params, state, key, X), 1e-6)
    assert not large(blocks.apply, params, state, key, X)


def test_parts_of_a_mesh_are_the_same():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    run = jax.shard_map(
        jax.vmap(in_blocks(attend)), mesh=mesh, in_specs=spec, out_specs=spec
    )
    x = jnp.stack([X, -2 * X])
    close(jax.jit(run)(x), jax.vmap(attend)(x), 1e-6)
    outside = in_blocks(
        jax.shard_map(jax.vmap(attend), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    close(jax.jit(outside)(x), jax.vmap(attend)(x), 1e-6)
