"""Attention in functions of others is found, shown and changed; nothing else is."""

import dataclasses
import functools

import chex
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention
from mha_haiku.core import sites
from tests import everyday
from tests.core.sites import foreign
from tests.core.sites.foreign import CASES, B, D, H, S, T

FACETS = ("query", "key", "weights", "value", "map", "heads")
GATES = np.linspace(-0.5, 1.5, H).astype(np.float32)

every_case = pytest.mark.parametrize("name", everyday.some(CASES, 12))


@functools.cache
def _found(name):
    """Returns the output of a case, and what is found in it by facet."""
    case = CASES[name]()
    output, found = jax.jit(sites.look(case.function, ["*"]))(*case.arguments)
    assert set(found) == {f"{case.name}/{facet}" for facet in FACETS}
    return output, {facet: found[f"{case.name}/{facet}"] for facet in FACETS}


@functools.cache
def _changed(name):
    """Returns what edits of a case give, and the same by hand, in one program."""
    case = CASES[name]()
    gates = jnp.asarray(GATES[: case.num_heads])

    def edited(**edits):
        edits = {f"*/{facet}": edit for facet, edit in edits.items()}
        return sites.edit(case.function, edits)

    def gated(gates, params, x, y):
        gates = gates.reshape(1, 1, -1, 1)
        return edited(heads=lambda heads: heads * gates)(params, x, y)

    def gated_by_hand(gates, params, x, y):
        return case.function(case.gated(params, gates), x, y)

    def with_gradient(function, arguments):
        def total(gates):
            output = function(gates, *arguments)
            return (output @ jnp.cos(jnp.arange(D, dtype=output.dtype))).sum(), output

        (_, output), gradient = jax.value_and_grad(total, has_aux=True)(gates)
        return output, gradient

    @jax.jit
    def run(params, x, y):
        arguments = params, x, y
        unasked = case.unasked(params), x, y
        without_queries, found = sites.look(case.function, ["*/weights"])(*unasked)
        (weights,) = found.values()
        reweighted = edited(weights=lambda _: weights)
        return {
            "gated": with_gradient(gated, arguments),
            "gated by hand": with_gradient(gated_by_hand, arguments),
            "without head 0": gated(gates.at[0].set(0), *arguments),
            "weights without queries": weights,
            "without queries": without_queries,
            "reweighted": sites.look(reweighted, ["*"])(*arguments),
            "queries edited": edited(query=jnp.zeros_like)(*arguments),
            "values doubled": edited(value=lambda x: 2 * x)(*arguments),
            "heads doubled": edited(heads=lambda x: 2 * x)(*arguments),
        }

    return run(*case.arguments)


@every_case
def test_attention_is_shown_in_canonical_axes(name):
    """And the output stays the same to the bit."""
    case, (output, found) = CASES[name](), _found(name)
    np.testing.assert_array_equal(output, jax.jit(case.function)(*case.arguments))
    key_size, value_size = (found[x].shape[-1] for x in ("query", "value"))
    chex.assert_shape(found["query"], (B, T, case.num_heads, key_size))
    chex.assert_shape(found["key"], (B, S, case.num_key_heads, key_size))
    chex.assert_shape(found["value"], (B, S, case.num_key_heads, value_size))
    chex.assert_shape(found["weights"], (B, case.num_heads, T, S))
    chex.assert_shape(found["heads"], (B, T, case.num_heads, value_size))
    for operand in ("query", "key", "value"):  # the map has them, too
        chex.assert_trees_all_equal(getattr(found["map"], operand), found[operand])
    weights, map_ = found["weights"], found["map"]
    expected = case.expected(*case.arguments)
    np.testing.assert_allclose(weights, expected, atol=case.tolerance)
    sums = weights.sum(-1)
    is_one, is_masked = np.isclose(sums, 1, atol=1e-5), weights.max(-1) == 0
    assert is_one.all() == case.sums_to_one
    assert (map_.rows_sum_to == "1") == (is_one | is_masked).all()
    if (expected >= 0).all():  # talking heads may have others, of which there is no map
        np.testing.assert_allclose(map_.weights(), weights, atol=case.tolerance)
    if "dropout" in name:
        return  # weights are those before dropout
    weights, value = (np.asarray(found[x], np.float64) for x in ("weights", "value"))
    value = np.repeat(value, case.num_heads // case.num_key_heads, axis=2)
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    np.testing.assert_allclose(found["heads"], expected, atol=10 * case.tolerance)


@every_case
def test_edits_of_attention_are_changes_by_hand(name):
    case, changed = CASES[name](), _changed(name)
    tolerance = 10 * case.tolerance
    chex.assert_trees_all_close(
        changed["gated"], changed["gated by hand"], rtol=1e-4, atol=10 * tolerance
    )
    output, gradient = changed["gated"]
    assert np.abs(output - changed["without head 0"]).max() > 1e-2
    assert np.abs(gradient).min() > 0
    output, found = changed["reweighted"]
    expected = changed["without queries"]
    np.testing.assert_allclose(output, expected, atol=tolerance)
    np.testing.assert_allclose(changed["queries edited"], expected, atol=tolerance)
    # What looks at an edited function sees what the edit left, and all of it once.
    assert {x.rpartition("/")[2] for x in found} == set(FACETS)
    assert len(found) == len(FACETS)
    found = {name.rpartition("/")[2]: value for name, value in found.items()}
    weights = changed["weights without queries"]
    np.testing.assert_array_equal(found["weights"], weights)
    if (weights >= 0).all():
        np.testing.assert_allclose(found["map"].weights(), weights, rtol=1e-5)
    np.testing.assert_allclose(
        changed["values doubled"], changed["heads doubled"], rtol=1e-4, atol=tolerance
    )
    gradient = jax.grad(lambda *x: case.function(*x).sum(), argnums=(0, 1, 2))
    names = sites.sites(gradient, *case.arguments)
    names = {name.removeprefix("rematted_computation/") for name in names}
    assert names == {f"{case.name}/{facet}" for facet in FACETS}


@pytest.mark.parametrize("name", foreign.OTHERS)
def test_other_softmaxes_are_no_attention(name):
    function, *arguments = foreign.OTHERS[name]
    assert not sites.sites(function, *arguments)
    assert not sites.sites(jax.grad(lambda *x: function(*x).sum(), 1), *arguments)


# Three inputs, of different lengths where they may be, through projections.
_INPUTS = tuple(
    np.random.default_rng(i).standard_normal((B, size, D)).astype(np.float32)
    for i, size in enumerate((T, S, S))
)


def _scanned_over_examples():
    """In a jitted function of one example, in the body of a scan."""
    case = CASES["haiku"]()
    one = jax.jit(lambda params, *x: case.function(params, *x)[0])

    def scanned(params, *inputs):
        inputs = [x[:, None] for x in inputs]
        body = lambda carry, x: (carry, one(params, *x))  # noqa: E731
        return jax.lax.scan(body, 0, inputs)[1]

    return dataclasses.replace(case, function=scanned)


_OF_THREE = [CASES[x] for x in ("linen", "nnx", "haiku", "equinox_under_vmap")]


@pytest.mark.parametrize("make", [*_OF_THREE, _scanned_over_examples])
def test_three_inputs_are_told_from_parameters_where_these_are_known(make):
    function, params = make().function, make().params
    reason = r"projections of different inputs, mh.wrap\(f, params\) can tell"
    with pytest.raises(ValueError, match=reason):
        sites.look(function, ["*/heads"])(params, *_INPUTS)

    def of_query(params, query, key, value):
        return function(params, query, key, value)

    wrapped = mh.wrap(of_query, params)
    query, key, value = _INPUTS
    inputs = {"query": query, "key": key, "value": value}
    output, found = wrapped.look(inputs, ["*/weights", "*/heads"])
    for name, value in found.items():
        is_weights = name.endswith("weights")
        assert value.shape[-3:-1] == ((H, T) if is_weights else (T, H))
    expected = function(params, *_INPUTS)
    np.testing.assert_allclose(output.logits, expected, rtol=1e-5, atol=1e-5)
    edited = wrapped.edited({"*/weights": jnp.zeros_like}).logits(inputs)
    bias = np.broadcast_to(edited[:1, :1], edited.shape)
    np.testing.assert_allclose(edited, bias, atol=1e-6)


def test_parameters_that_are_known_are_no_keys_or_values():
    w = [np.float32(x) for x in np.random.default_rng(0).standard_normal((5, D, D))]
    for function in (
        lambda w, x: jax.nn.softmax(x @ w[0]) @ w[1],  # a router, or a codebook
        lambda w, x: jax.nn.softmax((x @ w[0]) @ (w[1] @ w[2])) @ (w[3] @ w[4]),
    ):
        assert not mh.wrap(function, w).sites(_INPUTS[0])


def _over_channels(params, x):
    """XCiT: channels attend to channels, so that positions are the size of queries."""
    query, key, value = (
        (x @ w).reshape(B, S, 4, -1).transpose(0, 2, 3, 1) for w in params[:3]
    )
    heads = jax.nn.softmax(query @ key.mT) @ value
    return heads.transpose(0, 3, 1, 2).reshape(B, S, D) @ params[3]


def _of_some_queries(params, x):
    """Informer: the queries of the largest norms attend, the others get the mean."""
    query, key, value = (
        (x @ w).reshape(B, S, 4, -1).swapaxes(1, 2).reshape(B * 4, S, -1)
        for w in params[:3]
    )
    _, top = jax.lax.top_k(jnp.square(query).sum(-1), T)
    rows = np.arange(B * 4)[:, None]
    heads = jax.nn.softmax(query[rows, top] @ key.mT) @ value
    mean = jnp.broadcast_to(value.mean(1, keepdims=True), value.shape)
    whole = mean.at[rows, top].set(heads).reshape(B, 4, S, -1).swapaxes(1, 2)
    return whole.reshape(B, S, D) @ params[3]


def _of_one_input(params, x):
    """Batch and heads are folded before the function begins."""
    return jax.nn.softmax(x @ x.mT) @ x


@pytest.mark.parametrize(
    ("function", "inputs", "shape", "is_assumed"),
    [
        (_over_channels, _INPUTS[1], (B, 4, D // 4, D // 4), True),
        (_of_some_queries, _INPUTS[1], (B, 4, T, S), False),
        (_of_one_input, _INPUTS[1], (B, 1, S, S), True),
        (_of_one_input, _INPUTS[1].reshape(B, 4, S, -1), (B, 4, S, S), True),
    ],
)
def test_heads_are_in_their_place_or_it_is_said_that_they_are_assumed(
    function, inputs, shape, is_assumed
):
    params = [np.float32(x) for x in np.random.default_rng(0).normal(size=(4, D, D))]
    found = mh.wrap(function, params).sites(inputs)
    assert found["attention_0/weights"].shape == shape
    assert ("Nothing tells the axis of heads of attention_0" in repr(found)) == (
        is_assumed
    )


_JOINED = {
    "of nothing": lambda x: jnp.concatenate([jnp.arange(3.0), jnp.arange(3.0)]),
    "of random numbers": lambda x: jnp.stack(
        [jax.random.normal(jax.random.key(i), (3,)) for i in range(2)]
    ),
    "gathers": lambda x: jnp.concatenate([x[0, 0, np.array([0, 1])]] * 2),
    "stacks": lambda x: jnp.concatenate([jnp.stack([*x[0, :2]])] * 2),
    "results of a loop": lambda x: jnp.concatenate(
        [jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[1]] * 2
    ),
    "products": lambda x: jnp.stack([x @ x[0].T, x @ x[1].T], -1),
    "empty slices": lambda x: jnp.concatenate([x[:0], x[:0]]),
    "the same slice": lambda x: jnp.concatenate([x[:1], x[:1]]),
    "slices with steps": lambda x: jnp.stack([x[..., 0::2], x[..., 1::2]], -1),
    "in another order": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
}


@pytest.mark.parametrize("join", _JOINED)
def test_whatever_else_a_program_joins_its_attention_is_found(join):
    case = CASES["plain"]()

    def function(params, x, y):
        return case.function(params, x, y), _JOINED[join](x)

    edited = sites.edit(function, {"*/heads": jnp.zeros_like})(*case.arguments)
    assert not edited[0].any()
    np.testing.assert_array_equal(edited[1], _JOINED[join](case.inputs[0]))


# --- Several attentions, and sites within sites


def _three_layers(params, x, y):
    """An encoder-decoder of sorts: one attention to y, two to its own stream."""
    attend = CASES["plain"]().function
    x = attend(params, x, y)
    for _ in range(2):
        x = x + attend(params, x, x)
    return x


def _arguments():
    return CASES["plain"]().arguments


@pytest.mark.slow
def test_every_look_sees_what_edits_inside_have_left_and_each_attention_once():
    once = sites.edit(_three_layers, {"attention_1/heads": lambda x: 0 * x})
    twice = sites.edit(once, {"attention_2/weights": lambda x: x / 2})
    _, found = sites.look(twice, ["*/weights", "*/heads"])(*_arguments())
    assert set(found) == {
        f"attention_{i}/{facet}" for i in range(3) for facet in ("weights", "heads")
    }
    sums = [found[f"attention_{i}/weights"].sum(-1) for i in range(3)]
    np.testing.assert_allclose(sums[0], 1, rtol=1e-5)
    np.testing.assert_allclose(sums[2], 0.5, rtol=1e-5)
    assert not found["attention_1/heads"].any()
    assert found["attention_0/heads"].any()
    names = set(sites.sites(_three_layers, *_arguments()))
    assert set(sites.sites(twice, *_arguments())) == names


@pytest.mark.slow
def test_under_vmap_there_is_an_axis_more():
    params, x, y = _arguments()
    batched = x[None], y[None]

    def mapped(function):
        return jax.vmap(function, (None, 0, 0))

    look = functools.partial(sites.look, at=["*/weights", "*/map"])
    _, outside = look(mapped(_three_layers))(params, *batched)
    _, inside = mapped(look(_three_layers))(params, *batched)
    _, alone = look(_three_layers)(params, x, y)
    for name, value in alone.items():
        if name.endswith("map"):
            continue
        chex.assert_shape([outside[name], inside[name]], (1, *value.shape))
        chex.assert_trees_all_close(outside[name][0], value, rtol=1e-5)
        chex.assert_trees_all_close(inside[name][0], value, rtol=1e-5)
    edits = {"attention_1/heads": lambda x: 2 * x}
    expected = sites.edit(_three_layers, edits)(params, x, y)
    for edited in (
        mapped(sites.edit(_three_layers, edits)),
        sites.edit(mapped(_three_layers), edits),
    ):
        chex.assert_trees_all_close(
            edited(params, *batched)[0], expected, rtol=1e-5, atol=1e-5
        )


def _layer_stack():
    def model(x):
        def layer(x):
            scale = hk.initializers.VarianceScaling()
            return x + hk.MultiHeadAttention(H, 7, w_init=scale, model_size=D)(x, x, x)

        return hk.experimental.layer_stack(3)(layer)(x)

    model = hk.without_apply_rng(hk.transform(model))
    x = foreign.Case.inputs[0]
    return model.apply, (model.init(jax.random.key(0), x), x), "multi_head_attention"


def _nnx_scan():
    class Layer(flax.nnx.Module):
        def __init__(self, rngs):
            self.attention = flax.nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)

        def __call__(self, x):
            return x + self.attention(x)

    layers = flax.nnx.split_rngs(splits=3)(flax.nnx.vmap(Layer))(flax.nnx.Rngs(0))
    scan = flax.nnx.scan(
        lambda x, layer: layer(x), in_axes=(flax.nnx.Carry, 0), out_axes=flax.nnx.Carry
    )
    graph, params = flax.nnx.split(layers)
    x = foreign.Case.inputs[0]
    return lambda params, x: scan(x, flax.nnx.merge(graph, params)), (params, x), None


@pytest.mark.slow
@pytest.mark.parametrize("make", [_layer_stack, _nnx_scan])
def test_scanned_layers_have_their_numbers(make):
    function, arguments, module = make()
    module = module or "attention_0"
    output, found = sites.look(function, ["*/weights"])(*arguments)
    assert set(found) == {f"{i}/{module}/weights" for i in range(3)}
    weights = np.stack([found[f"{i}/{module}/weights"] for i in range(3)])
    chex.assert_shape(weights, (3, B, H, T, T))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert len(np.unique(weights.std(axis=(1, 2, 3, 4)))) == 3
    np.testing.assert_allclose(output, function(*arguments), rtol=1e-5, atol=1e-6)

    def without(layer):
        edits = {f"{layer}/{module}/heads": jnp.zeros_like}
        return sites.edit(function, edits)(*arguments)

    assert np.abs(without(2) - output).max() > 1e-3
    assert np.abs(without(2) - without(1)).max() > 1e-3


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_own_attention_is_no_attention_of_others(implementation):
    def ours(query, key, value):
        return attention.attend(query, key, value, implementation=implementation)[0]

    query, key = jnp.ones((B, T, H, 7)), jnp.ones((B, S, H, 7))
    edited = sites.edit(ours, {"heads": lambda x: 2 * x})
    gradient = jax.grad(lambda *x: ours(*x).sum())
    for function in (ours, jax.jit(ours), edited, gradient, jax.vmap(ours)):
        names = ["scores", "map", "weights", "heads"]
        assert list(sites.sites(function, query, key, key)) == names


def test_attention_that_is_said_to_have_sites_is_not_recognized():
    def function(query, key):
        with jax.named_scope(sites.SEEN):
            return jax.nn.dot_product_attention(query, key, key)

    query, key = jnp.ones((B, T, H, 7)), jnp.ones((B, S, H, 7))
    assert not sites.sites(function, query, key)
    assert not sites.sites(lambda *x: jax.jit(function)(*x), query, key)


# --- Axes of size 1, and what has no heads


@pytest.mark.parametrize("num_queries", [1, T])
@pytest.mark.parametrize("num_keys", [1, S])
@pytest.mark.parametrize("batch_size", [1, B])
@pytest.mark.parametrize(
    "name", ["plain", "products_of_matrices", "one_head", "jax_nn"]
)
def test_axes_of_size_1_are_axes(name, batch_size, num_keys, num_queries):
    case = CASES[name]()
    x, y = case.inputs
    arguments = case.params, x[:batch_size, :num_queries], y[:batch_size, :num_keys]
    shapes = {
        name.rpartition("/")[2]: value.shape
        for name, value in sites.sites(case.function, *arguments).items()
    }
    assert set(shapes) == set(FACETS)
    assert shapes["weights"] == (batch_size, case.num_heads, num_queries, num_keys)
    assert shapes["query"][:3] == (batch_size, num_queries, case.num_heads)
    assert shapes["value"][:3] == (batch_size, num_keys, case.num_key_heads)
    assert shapes["heads"][:3] == (batch_size, num_queries, case.num_heads)


# Of 8 queries 4 heads are a divisor, so that axes may be cut in other places.
_X = np.random.default_rng(0).normal(size=(2, 8, 20)).astype(np.float32)
_W = np.random.default_rng(1).normal(size=(4, 20, 20)).astype(np.float32) / 20**0.5


def _heads(x):
    return jnp.swapaxes(x.reshape(2, 8, 4, 5), 1, 2)


def _untransposed(query, key, value):
    weights = jax.nn.softmax(_heads(query) @ jnp.swapaxes(_heads(key), 2, 3))
    return (weights @ _heads(value)).reshape(2, 8, 20)


def _heads_in_front(query, key, value):  # [H, B, T, S], never merged
    query, key, value = (
        jnp.moveaxis(x.reshape(2, 8, 4, 5), 2, 0) for x in (query, key, value)
    )
    weights = jax.nn.softmax(query @ jnp.swapaxes(key, 2, 3))
    return (weights @ value).reshape(2, 8, 20)


def _one_key_head_as_an_axis(query, key, value):
    key, value = key[:, :, None, :5], value[:, :, None, :5]
    scores = jnp.einsum("btgrk,bsgk->bgrts", query.reshape(2, 8, 1, 4, 5), key)
    heads = jnp.einsum("bgrts,bsgv->btgrv", jax.nn.softmax(scores), value)
    return heads.reshape(2, 8, 20)


def _split_to_batches(query, key, value):
    query, key, value = (
        jnp.concatenate(jnp.split(x, 4, axis=-1), 0) for x in (query, key, value)
    )
    heads = jax.nn.softmax(query @ jnp.swapaxes(key, 1, 2)) @ value
    return jnp.concatenate(jnp.split(heads, 4, axis=0), -1)


def _heads_of_queries_as_an_axis(query, key, value):  # [B, T H, S]
    query = query.reshape(2, 32, 5)
    scores = query @ jnp.swapaxes(key[..., :5], 1, 2)
    return (jax.nn.softmax(scores) @ value[..., :5]).reshape(2, 8, 20)


@pytest.mark.parametrize(
    "attend, num_key_heads",
    [
        (_untransposed, 4),
        (_heads_in_front, 4),
        (_one_key_head_as_an_axis, 1),
        (_split_to_batches, 4),
        (_heads_of_queries_as_an_axis, 1),
    ],
)
def test_heads_are_those_of_the_projection_of_queries(attend, num_key_heads):
    def function(x):
        return attend(*(x @ w for w in _W[:3])) @ _W[3]

    _, found = jax.jit(sites.look(function, ["*"]))(_X)
    found = {name.removeprefix("attention_0/"): x for name, x in found.items()}
    query, key, value = (np.float64(_X @ w) for w in _W[:3])
    key, value = (x[..., : 5 * num_key_heads] for x in (key, value))
    query, key, value = (x.reshape(2, 8, -1, 5) for x in (query, key, value))
    weights = foreign.oracles.attention(query, key / 5**-0.5, value).weights
    np.testing.assert_allclose(found["weights"], weights, atol=1e-5)
    np.testing.assert_allclose(found["query"], query, atol=1e-5)
    np.testing.assert_allclose(found["key"], key, atol=1e-5)
    repeated = np.repeat(value, 4 // num_key_heads, 2)
    heads = np.einsum("bhts,bshv->bthv", weights, repeated)
    np.testing.assert_allclose(found["heads"], heads, atol=1e-5)


@pytest.mark.parametrize("are_queries_computed_twice", [False, True])
def test_what_two_equations_compute_is_one_number(are_queries_computed_twice):
    def function(x):
        first = _W[0]
        query, key, value = (x @ w for w in (first, *_W[1:3]))
        scores = query @ jnp.swapaxes(key, 1, 2)
        again = (x @ first) @ jnp.swapaxes(key, 1, 2)
        again = again if are_queries_computed_twice else scores
        weights = jnp.exp(scores) / jnp.sum(jnp.exp(again), -1, keepdims=True)
        return weights @ value

    _, found = jax.jit(sites.look(function, ["*"]))(_X)
    scores = np.float64(_X @ _W[0]) @ np.swapaxes(_X @ _W[1], 1, 2)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found["attention_0/weights"][:, 0], weights, atol=1e-5)
    assert found["attention_0/map"].rows_sum_to == "1"
    edited = jax.jit(sites.edit(function, {"*/query": jnp.zeros_like}))
    if are_queries_computed_twice:  # an edit would reach one of the two
        with pytest.raises(ValueError, match="reads it elsewhere"):
            edited(_X)
    else:
        mean = np.broadcast_to((_X @ _W[2]).mean(1, keepdims=True), _X.shape)
        np.testing.assert_allclose(edited(_X), mean, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["difference of two softmaxes", "division after the product"]
)
def test_a_softmax_of_another_form_is_told(name):
    function, *arguments = foreign.OTHERS[name]
    advice = "a softmax that reaches a matrix product in a form that is not recognized"
    assert advice in repr(sites.sites(function, *arguments))
    with pytest.raises(ValueError, match=advice):
        sites.look(function, ["*/heads"])(*arguments)
    known = sites.sites(CASES["plain"]().function, *_arguments())
    assert advice not in repr(known)
    gradient = jax.grad(lambda *x: CASES["plain"]().function(*x).sum())
    assert advice not in repr(sites.sites(gradient, *_arguments()))


def _mamba(w, x):
    """Mamba-2 as one chunk, and the norm after it."""
    query, key, value, gate = (x @ w for w in w)
    decay = jnp.cumsum(-jax.nn.softplus(x @ w[0][:, 0]), 1)
    decay = jnp.exp(decay[:, :, None] - decay[:, None]) * np.tri(x.shape[1])[None]
    x = ((query @ key.mT) * decay) @ value * jax.nn.silu(gate)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True)) @ w[0]


def _xlstm(w, x):
    """The matrix memory of xLSTM, in parallel, with its normalizer."""
    query, key, value, _ = (x @ w for w in w)
    forget = jnp.cumsum(jax.nn.log_sigmoid(x @ w[3][:, 0]), 1)
    log = forget[:, :, None] - forget[:, None] + (x @ w[3][:, 1])[:, None]
    largest = log.max(-1, keepdims=True)
    decay = (query @ key.mT) * jnp.exp(log - largest)
    total = jnp.maximum(jnp.abs(decay.sum(-1, keepdims=True)), jnp.exp(-largest))
    return (decay / total) @ value


def _with_gated_weights(w, x):
    query, key, value, gate = (x @ w for w in w)
    weights = jax.nn.softmax(query @ key.mT) * jax.nn.sigmoid(gate @ gate.mT)
    return weights @ value


@pytest.mark.parametrize(
    ("function", "is_told"),
    [(_mamba, False), (_xlstm, False), (_with_gated_weights, True)],
)
def test_only_a_softmax_is_told(function, is_told):
    w = [np.float32(x) for x in np.random.default_rng(0).normal(size=(4, D, D))]
    shown = repr(sites.sites(function, w, _INPUTS[1]))
    assert ("It has a softmax that reaches" in shown) == is_told
    assert "weights" not in shown


_SEEN = np.tri(4, dtype=bool)[None]
_MASKINGS = {
    "low": lambda s: jax.nn.softmax(jnp.where(_SEEN, s, -1e9)),
    "minus infinity": lambda s: jax.nn.softmax(jnp.where(_SEEN, s, -jnp.inf)),
    "added": lambda s: jax.nn.softmax(s - 1e4 * ~_SEEN),
    "of exponentials": lambda s: jax.nn.softmax(s, where=_SEEN),
    "no query": lambda s: jnp.where(
        np.arange(4)[None, :, None] > 0,
        jax.nn.softmax(jnp.where(_SEEN, s, -jnp.inf)),
        0,
    ),
}


@pytest.mark.parametrize("masking", _MASKINGS)
def test_the_map_has_the_mask_of_the_program(masking):
    def attend(x, w):
        query, key, value = (x @ w for w in w)
        return _MASKINGS[masking](query @ key.mT) @ value

    x = jax.random.normal(jax.random.key(0), (2, 4, 6))
    # Weights of scores that are this far below others are rounded to 0.
    far = x.at[:, 1].multiply(8)
    w = jax.random.normal(jax.random.key(1), (3, 6, 6))
    seen = _SEEN.copy()
    seen[:, 0] &= masking != "no query"
    look = jax.jit(sites.look(attend, ["*/map"]))
    for inputs in (x,) if masking == "of exponentials" else (x, far):
        map_ = look(inputs, w)[1]["attention_0/map"]
        found = np.broadcast_to(map_.weighting.mask.array(4, 4), map_.shape)
        np.testing.assert_array_equal(found, np.broadcast_to(seen, map_.shape))
        expected = _MASKINGS[masking]((inputs @ w[0]) @ (inputs @ w[1]).mT)
        np.testing.assert_allclose(map_.weights()[:, 0], expected, atol=1e-6)
        np.testing.assert_array_equal(map_.sees[:, 0], np.repeat(seen.any(-1), 2, 0))
    assert ((expected == 0) & seen).any() == (masking != "of exponentials")


def test_batches_of_one_head_stay_batches_when_their_losses_are_summed():
    case = CASES["one_head"]()

    def loss(params, x, y):
        x, y = x @ params["query"][:, 0], y @ params["key"][:, 0]
        scores = x @ jnp.swapaxes(y, 1, 2)
        hidden = jax.nn.softmax(scores) @ y @ params["output"][0, :, :7].T
        return (hidden.mean(1) ** 2).sum(-1).mean()

    params = case.params | {"output": jnp.ones((1, 4, 7))}
    found = sites.sites(loss, params, *case.inputs)
    assert found["attention_0/weights"].shape == (B, 1, T, S)


def test_queries_keys_and_values_that_are_given_need_no_common_source():
    query, key, value = (
        jnp.ones((B, T, H, 7)),
        jnp.ones((B, S, H, 7)),
        jnp.ones((B, S, H, 7)),
    )
    for function in (
        jax.nn.dot_product_attention,
        jax.jit(jax.nn.dot_product_attention),
    ):
        found = sites.sites(function, query, key, value)
        assert found["attention_0/weights"].shape == (B, H, T, S)


def test_what_the_program_reads_elsewhere_can_only_be_looked_at():
    def function(x):  # queries, keys and values without projections
        return x + jax.nn.softmax(x @ x.T) @ x

    x = foreign.Case.inputs[0][0]
    _, found = sites.look(function, ["*/key", "*/weights"])(x)
    np.testing.assert_array_equal(found["attention_0/key"], x[:, None])
    with pytest.raises(
        ValueError, match="not edited: the program also reads it elsewhere"
    ):
        sites.edit(function, {"*/query": jnp.zeros_like})(x)
    with pytest.raises(ValueError, match='not edited: edit "weights"'):
        sites.edit(function, {"*/map": lambda map_: map_})(x)


@pytest.mark.slow
def test_queries_and_keys_of_two_softmaxes_can_only_be_looked_at():
    w = jax.random.normal(jax.random.key(0), (3, 6, 6))

    def function(x):
        query, key, value = (x @ w for w in w)
        scores = query @ key.mT
        local = jnp.where(_SEEN, scores, -1e9)
        return jax.nn.softmax(scores) @ value, jax.nn.softmax(local) @ value

    x = jax.random.normal(jax.random.key(1), (2, 4, 6))
    _, found = sites.look(function, ["*/query"])(x)
    np.testing.assert_allclose(found["attention_1/query"][:, :, 0], x @ w[0], atol=1e-5)
    for facet in ("query", "key"):
        with pytest.raises(
            ValueError, match=f"attention_1/{facet}.*reads it elsewhere"
        ):
            sites.edit(function, {f"attention_1/{facet}": jnp.zeros_like})(x)
    edited = sites.edit(function, {"attention_1/weights": jnp.zeros_like})(x)
    np.testing.assert_array_equal(edited[0], function(x)[0])
    np.testing.assert_array_equal(edited[1], 0)
