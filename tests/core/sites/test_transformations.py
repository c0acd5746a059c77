"""Look and edit, on programs small enough to write both sides by hand."""

import dataclasses
import functools
from typing import Any

import chex
import equinox
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku.core import attention, sites

L, B, D = 3, 4, 5

_KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(_KEYS[0], (B, D))
WEIGHTS = jax.random.normal(_KEYS[1], (L, D, D))


def layer(x, w, i, change=lambda h, i: h):
    """A layer with a site; `change` says by hand what an edit does."""
    with jax.named_scope(f"layer_{i}"):
        hidden = sites.site("hidden", jnp.tanh(x @ w))
    return x + change(hidden, i)


def by_hand(change, x=X, weights=WEIGHTS):
    """Returns the output of L layers, with the hidden units changed."""
    for i, w in enumerate(weights):
        x = x + change(jnp.tanh(x @ w), i)
    return x


def looped(x, weights):
    for i, w in enumerate(weights):
        x = layer(x, w, i)
    return x


def scanned(x, weights):
    return jax.lax.scan(lambda x, w: (layer(x, w, 0), None), x, weights)[0]


def rematerialized(x, weights):
    body = jax.checkpoint(lambda x, w: (layer(x, w, 0), None))
    return jax.lax.scan(body, x, weights)[0]


def jitted(x, weights):
    return jax.jit(looped)(x, weights)


def custom(x, weights):
    """Each layer has a gradient of its own, which is the true one."""
    for i, w in enumerate(weights):
        own = jax.custom_vjp(functools.partial(layer, i=i))
        own.defvjp(
            lambda x, w, i=i: jax.vjp(functools.partial(layer, i=i), x, w),
            lambda pull, slope: pull(slope),
        )
        x = own(x, w)
    return x


def branched(x, weights):
    def whole(x):
        return looped(x, weights)

    return jax.lax.cond(x.sum() < 1e6, whole, lambda x: x, x)


def mapped(x, weights):
    """Without the batch axis inside."""
    return jax.vmap(lambda x: looped(x, weights))(x)


PROGRAMS = {
    each.__name__: each
    for each in (looped, scanned, rematerialized, jitted, custom, branched, mapped)
}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def halved_second(h, i):
    return h / 2 if i == 1 else h


@pytest.mark.parametrize("variant", [jax.jit, lambda function: function])
def test_a_look_finds_each_layer_by_name(program, variant):
    output, found = variant(sites.look(program, ["*/hidden"]))(X, WEIGHTS)
    hidden = []
    by_hand(lambda h, i: hidden.append(h) or h)
    assert list(found) == [f"layer_{i}/hidden" for i in range(L)]
    chex.assert_trees_all_close(list(found.values()), hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output, looped(X, WEIGHTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [jax.jit, lambda function: function])
def test_an_edit_of_one_layer_is_that_by_hand(program, variant):
    edited = sites.edit(program, {"layer_1/hidden": lambda h: h / 2})
    output = variant(edited)(X, WEIGHTS)
    np.testing.assert_allclose(output, by_hand(halved_second), rtol=1e-5, atol=1e-5)


def test_nothing_edited_changes_no_bit(program):
    edited = sites.edit(program, {"*/hidden": lambda h: h})
    np.testing.assert_array_equal(
        jax.jit(edited)(X, WEIGHTS), jax.jit(program)(X, WEIGHTS)
    )


def test_a_change_may_take_the_layer(program):
    scales = jnp.array([0.5, 2.0, -1.0])
    edited = sites.edit(program, {"layer_*/hidden": lambda h, i: h * scales[i]})
    expected = by_hand(lambda h, i: h * scales[i])
    np.testing.assert_allclose(edited(X, WEIGHTS), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_what_an_edit_reads_are_those_by_hand(program):
    def through(run):
        return jax.grad(lambda scales: jnp.square(run(scales)).sum())(jnp.ones(L))

    found = through(
        lambda scales: sites.edit(program, {"*/hidden": lambda h, i: h * scales[i]})(
            X, WEIGHTS
        )
    )
    expected = through(lambda scales: by_hand(lambda h, i: h * scales[i]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_vmap_over_edits_is_one_edit_after_the_other(program):
    def ablated(scales):
        return sites.edit(program, {"*/hidden": lambda h, i: h * scales[i]})(X, WEIGHTS)

    patterns = 1 - jnp.eye(L)
    expected = jnp.stack([ablated(each) for each in patterns])
    np.testing.assert_allclose(
        jax.vmap(ablated)(patterns), expected, rtol=1e-5, atol=1e-5
    )


def test_gradients_of_an_edited_function_are_those_by_hand(program):
    def through(run):
        return jax.grad(lambda w: jnp.square(run(w)).sum())(WEIGHTS)

    found = through(
        lambda w: sites.edit(program, {"layer_1/hidden": lambda h: h / 2})(X, w)
    )
    expected = through(lambda w: by_hand(halved_second, weights=w))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_look_sees_what_an_edit_left(program):
    edited = sites.edit(program, {"layer_0/hidden": lambda h: h * 0 + 7})
    twice = sites.edit(edited, {"layer_0/hidden": lambda h: h + 1})
    _, found = sites.look(twice, ["*/hidden"])(X, WEIGHTS)
    np.testing.assert_array_equal(found["layer_0/hidden"], jnp.full((B, D), 8.0))
    assert len(found) == L


def test_a_function_of_the_value_takes_its_place(program):
    means = {"*/hidden": lambda h, i: h.mean() + i}
    _, found = sites.look(program, means)(X, WEIGHTS)
    _, whole = sites.look(program, ["*/hidden"])(X, WEIGHTS)
    for i, (name, value) in enumerate(whole.items()):
        mean = value.mean(-1) if program is mapped else value.mean()
        np.testing.assert_allclose(found[name], mean + i, rtol=1e-5, atol=1e-5)


def test_the_list_of_sites_is_what_a_look_finds(program):
    listed = sites.sites(program, X, WEIGHTS)
    _, found = sites.look(program, ["*"])(X, WEIGHTS)
    assert list(listed) == list(found)
    assert jax.tree.map(jnp.shape, dict(found)) == {
        name: value.shape for name, value in listed.items()
    }
    assert f"layer_2/hidden  float32[{B},{D}]" in str(listed)


@pytest.mark.parametrize("program", [looped, scanned], ids=["looped", "scanned"])
@pytest.mark.parametrize("first", range(L))
def test_resuming_at_a_layer_leaves_those_before_it_out(program, first):
    def entering(x, w, i):
        with jax.named_scope(f"layer_{i}"):
            return layer(sites.site("stream", x), w, "x")

    def looped(x):
        for i, w in enumerate(WEIGHTS):
            x = entering(x, w, i)
        return x

    def scanned(x):
        return jax.lax.scan(lambda x, w: (entering(x, w, 0), None), x, WEIGHTS)[0]

    function = {"looped": looped, "scanned": scanned}[program.__name__]

    @jax.jit
    def resumed(i):
        return sites.edit(function, {"layer_*/stream": sites.Resume(i, X + 1)})(
            jnp.full_like(X, jnp.nan)
        )

    expected = by_hand(lambda h, i: h, X + 1, WEIGHTS[first:])
    np.testing.assert_allclose(resumed(first), expected, rtol=1e-5, atol=1e-5)


def test_a_branch_that_was_not_taken_shows_nan():
    def function(x):
        return jax.lax.cond(
            x[0] > 0,
            lambda x: sites.site("positive", x * 2),
            lambda x: sites.site("negative", x * 3),
            x,
        )

    output, found = sites.look(function, ["positive", "negative"])(jnp.array([1.0]))
    assert output == found["positive"] == 2.0
    assert np.isnan(found["negative"])


def test_a_custom_gradient_is_kept_where_nothing_is_edited():
    @jax.custom_vjp
    def straight_through(x):
        return sites.site("rounded", jnp.round(x))

    straight_through.defvjp(
        lambda x: (straight_through(x), None), lambda _, slope: (slope,)
    )

    def loss(x):
        output, found = sites.look(straight_through, ["rounded"])(x)
        return output.sum(), found

    slope, found = jax.grad(loss, has_aux=True)(jnp.array([1.2]))
    assert slope == 1.0
    assert found["rounded"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["pmap", "shard_map"])
def test_values_of_several_devices_come_with_an_axis_of_them(spread):
    if spread == "pmap":
        function = jax.pmap(lambda x: looped(x, WEIGHTS))
        x = X.reshape(B, 1, D)
    else:
        mesh = jax.make_mesh((B,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("data")
        function = jax.shard_map(
            lambda x: looped(x, WEIGHTS), mesh=mesh, in_specs=spec, out_specs=spec
        )
        x = X
    output, found = sites.look(function, ["layer_1/hidden"])(x)
    _, expected = sites.look(looped, ["layer_1/hidden"])(X, WEIGHTS)
    assert found["layer_1/hidden"].shape == (B, 1, D)
    np.testing.assert_allclose(
        found["layer_1/hidden"][:, 0], expected["layer_1/hidden"], rtol=1e-5, atol=1e-5
    )
    edited = sites.edit(function, {"layer_1/hidden": lambda h: h / 2})(x)
    np.testing.assert_allclose(
        edited.reshape(B, D), by_hand(halved_second), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        output.reshape(B, D), looped(X, WEIGHTS), rtol=1e-5, atol=1e-5
    )


def test_a_site_passed_twice_has_a_number():
    def function(x):
        for _ in range(2):
            x = sites.site("shared/hidden", x + 1)
        return x

    _, found = sites.look(function, ["shared/hidden"])(jnp.zeros(()))
    assert {k: float(v) for k, v in found.items()} == {
        "shared#0/hidden": 1.0,
        "shared#1/hidden": 2.0,
    }
    edited = sites.edit(function, {"shared#1/hidden": lambda x: x * 10})
    assert edited(jnp.zeros(())) == 20.0


@pytest.mark.slow
def test_inside_of_haiku_parameters_and_keys_stay_what_they_are():
    def plain(x):
        x = hk.Linear(D, name="linear")(x)
        return hk.dropout(hk.next_rng_key(), 0.5, sites.site("hidden", x))

    def looked(x):
        output, found = sites.look(plain, ["hidden"])(x)
        return output, found["linear/hidden" if "linear/hidden" in found else "hidden"]

    key = jax.random.key(1)
    one, other = hk.transform(plain), hk.transform(looked)
    params = one.init(key, X)
    chex.assert_trees_all_equal(params, other.init(key, X))
    output, found = other.apply(params, key, X)
    np.testing.assert_array_equal(output, one.apply(params, key, X))
    expected = X @ params["linear"]["w"] + params["linear"]["b"][None]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_array_stays_what_it_is():
    def function(x, *, is_squared, activation):
        x = sites.site("hidden", activation(x))
        return (x**2 if is_squared else x), "label"

    looked = sites.look(function, ["hidden"])
    (output, label), _ = looked(X, is_squared=True, activation=jnp.tanh)
    np.testing.assert_allclose(output, jnp.tanh(X) ** 2, rtol=1e-5, atol=1e-5)
    assert label == "label"


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    first: Any
    second: Any = 1.0


@pytest.mark.parametrize("keep", [_Pair, lambda x: [_Pair({"x": (x,)})]])
def test_arrays_in_a_class_that_jax_does_not_know_are_refused(keep):
    def function(x):
        return keep(sites.site("hidden", x))

    assert list(sites.sites(function, X)) == ["hidden"]
    reading = sites.look(function, ["hidden"])
    for run in reading, sites.edit(function, {"hidden": jnp.cos}):
        with pytest.raises(TypeError, match=r"got _Pair .*register_dataclass\(_Pair"):
            run(X)


def test_an_object_without_arrays_of_the_function_is_returned_as_it_is():
    given = _Pair(X, {1: jax.jit(jnp.cos), "two": layer})
    looked = sites.look(lambda x: (sites.site("hidden", -x), given), ["hidden"])
    (output, found), _ = looked(X)
    assert found is given
    np.testing.assert_array_equal(output, -X)


@pytest.mark.parametrize("flag", [True, np.True_, np.str_("yes")])
def test_sites_take_what_looks_take(flag):
    def function(module, x, flag, size=2):
        x = module["activation"](x @ module["kernel"]) if flag else x
        return sites.site("hidden", x), "label"

    arguments = {"kernel": WEIGHTS[0], "activation": jnp.tanh}, X, flag
    (shown,) = sites.sites(function, *arguments, size=3).values()
    (output, _), found = sites.look(function, ["hidden"])(*arguments, size=3)
    assert shown.shape == found["hidden"].shape
    np.testing.assert_allclose(output, jnp.tanh(X @ WEIGHTS[0]), rtol=1e-5, atol=1e-5)
    edited, _ = sites.edit(function, {"hidden": lambda x: 2 * x})(*arguments)
    np.testing.assert_allclose(edited, 2 * output, rtol=1e-5)


def test_sites_of_a_module_of_equinox_are_listed():
    module = equinox.nn.MultiheadAttention(2, 6, key=jax.random.key(0))
    found = sites.sites(lambda module, x: module(x, x, x), module, jnp.ones((3, 6)))
    assert found["eqx.nn.MultiheadAttention/weights"].shape == (2, 3, 3)


def counted(x):
    return jax.lax.while_loop(
        lambda x: x[0] < 3, lambda x: sites.site("value", x + 1), x
    )


def test_values_in_a_while_loop_are_edited():
    edited = sites.edit(counted, {"value": lambda x: x + 1})
    assert edited(jnp.zeros(1)) == 4.0


def test_each_example_of_a_vmap_is_edited_until_its_own_while_loop_ends():
    def function(x, count):
        def body(carry):
            x, i = carry
            return x + sites.site("h", x[0] / 2), i + 1

        return jax.lax.while_loop(lambda x: x[1] < count, body, (x, 0))[0]

    counts = jnp.array([[1, 2, 0], [3, 1, 2]])
    run = jax.vmap(jax.vmap(function))
    for change, factor in (lambda h: h, 1.5), (lambda h: 2 * h, 2.0):
        found = sites.edit(run, {"h": change})(jnp.ones((2, 3, 1)), counts)
        np.testing.assert_allclose(found[..., 0], factor ** np.array(counts))


REFUSED = {
    "no such name": (
        lambda: sites.look(looped, ["layer_1/hiden"])(X, WEIGHTS),
        "'layer_1/hiden' names no site of the function, which has 3, such as layer_",
    ),
    "no sites": (lambda: sites.edit(jnp.sin, {"*": jnp.cos})(X), "has none"),
    "another shape": (
        lambda: sites.edit(scanned, {"layer_1/hidden": lambda h: h[0]})(X, WEIGHTS),
        r"the edit of 'layer_\*/hidden' must return a value like its argument",
    ),
    "another structure": (
        lambda: sites.edit(looped, {"layer_1/hidden": lambda h: (h, h)})(X, WEIGHTS),
        "must return a value like its argument",
    ),
    "turns of a while loop": (
        lambda: sites.look(counted, ["value"])(jnp.zeros(1)),
        "inside a while loop",
    ),
    "what can only be looked at": (
        lambda: sites.edit(
            lambda x: sites.faceted(
                x, (sites.Facet("sum", jnp.sum, None, "edit the terms"),)
            ),
            {"sum": jnp.cos},
        )(X),
        "'sum' can be read, not edited: edit the terms",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_pattern_of_all_paths_names_sites_without_one():
    x = jnp.ones((1, 3, 2, 4))
    function = lambda x: attention.attend(x, x, x)[0]  # noqa: E731
    assert list(sites.look(function, ["*/map"])(x)[1]) == ["map"]
    assert not sites.look(function, ["a/*/map"], strict=False)(x)[1]
    edited = sites.edit(function, {"/heads": lambda x: x.at[..., 1, :].set(0)})(x)
    assert not edited[..., 1, :].any() and edited[..., 0, :].all()


@pytest.mark.parametrize("name", ["b[1]", "b?", "[!c]", "b.1", "b\\1"])
def test_only_a_star_stands_for_other_names(name):
    def function(x):
        with jax.named_scope(name):
            y = sites.site("h", x + 1)
        with jax.named_scope("b1"):
            return y, sites.site("h", x)

    assert set(sites.sites(function, 1.0)) == {f"{name}/h", "b1/h"}
    edited = sites.edit(function, {f"{name}/h": lambda x: -x})
    assert edited(1.0) == (-2.0, 1.0)
    assert sites.edit(function, {f"*{name[1:]}/h": lambda x: -x})(1.0)[0] == -2.0


def test_a_pattern_that_names_nothing_may_be_allowed():
    _, found = sites.look(looped, ["nothing", "layer_0/*"], strict=False)(X, WEIGHTS)
    assert list(found) == ["layer_0/hidden"]


def test_leaves_without_the_axis_of_a_vmap_stay_without():
    def function(x, y):
        x, y = sites.site("pair", (x, y))
        return x * y

    def double_first(pair):
        return pair[0] * 2, pair[1]

    run = jax.vmap(sites.edit(jax.vmap(function, (1, None)), {"pair": double_first}))
    x, y = jnp.ones((2, 3, 4)), jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(
        run(x, y), 2 * jnp.broadcast_to(y[:, None], (2, 4, 3)), rtol=1e-5, atol=1e-5
    )
