"""Parameters convert from looped to scanned layers and back, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import modules

L, D, F = 3, 5, 7


def _looped(scope="encoder/", generator=None):
    generator = np.random.default_rng(0) if generator is None else generator
    normal = generator.standard_normal
    params = {"embedding": {"embeddings": normal((11, D))}}
    for i in range(L):
        params |= {
            f"{scope}layer_{i}/attention/query": {"w": normal((D, F)), "b": normal(F)},
            f"{scope}layer_{i}": {"scale": normal(())},
        }
    return params | {f"{scope}norm": {"scale": normal(D)}}


def _assert_equal(found, wanted):
    assert found.dtype == wanted.dtype
    assert type(found) is type(wanted)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("scope", ["", "encoder/", "model/~/encoder/"])
def test_layers_of_a_loop_are_stacked_along_a_first_axis(scope):
    params = _looped(scope)
    found = modules.stacked(params)
    assert found.keys() == {
        "embedding",
        f"{scope}layers/layer_0/attention/query",
        f"{scope}layers/layer_0",
        f"{scope}norm",
    }
    query = found[f"{scope}layers/layer_0/attention/query"]
    assert query["w"].shape == (L, D, F)
    assert found[f"{scope}layers/layer_0"]["scale"].shape == (L,)
    for i in range(L):
        wanted = params[f"{scope}layer_{i}/attention/query"]
        for name in ("w", "b"):
            np.testing.assert_array_equal(query[name][i], wanted[name])
    _assert_equal(found["embedding"]["embeddings"], params["embedding"]["embeddings"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "jax"])
def test_there_and_back_changes_no_bit(dtype):
    params = jax.tree.map(
        lambda x: jnp.asarray(x) if dtype == "jax" else np.asarray(x, dtype), _looped()
    )
    once = modules.stacked(params)
    again = modules.unstacked(once)
    assert again.keys() == params.keys()
    for module, leaves in params.items():
        assert again[module].keys() == leaves.keys()
        for name, leaf in leaves.items():
            _assert_equal(again[module][name], leaf)
    jax.tree.map(_assert_equal, modules.stacked(again), once)


def test_eleven_layers_stay_in_the_order_of_their_numbers():
    params = {f"layer_{i}": {"b": np.full(2, i)} for i in (10, 2, 0, *range(3, 10), 1)}
    stacked = modules.stacked(params)["layers/layer_0"]["b"]
    np.testing.assert_array_equal(stacked[:, 0], np.arange(11))


def test_two_stacks_of_other_depths_do_not_meet():
    params = _looped() | {"decoder/layer_0/norm": {"scale": np.ones(2)}}
    stacked = modules.stacked(params)
    assert stacked["decoder/layers/layer_0/norm"]["scale"].shape == (1, 2)
    assert modules.unstacked(stacked).keys() == params.keys()


def _without(module):
    params = _looped()
    del params[module]
    return params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"norm": {"scale": np.ones(2)}}, "there is no layer_0 .* parameters of norm"),
        ({}, "there is no layer_0 .* of no module"),
        (
            {"layer_0": {"b": np.ones(2)}, "layer_2": {"b": np.ones(2)}},
            r"numbered 0..L - 1 .* got layer_i for i in \[0, 2\]",
        ),
        (
            {"layer_0": {"b": np.ones(2)}, "layer_1": {"b": np.ones(3)}},
            "must have the same shape",
        ),
        (
            _without("encoder/layer_2/attention/query"),
            "encoder/layer_2 has others than encoder/layer_0",
        ),
        (
            _looped() | {"encoder/layer_1/more": {"b": np.ones(4)}},
            "encoder/layer_1 has others than encoder/layer_0",
        ),
        (modules.stacked(_looped()), "there is no layer_0 .* encoder/layers/layer_0"),
    ],
)
def test_layers_that_do_not_fit_a_stack_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        modules.stacked(params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (_looped(), "there is no layers/layer_0 .*encoder/layer_0"),
        (
            {"layers/layer_0": {"w": np.ones((3, 2)), "b": np.ones(4)}},
            r"axis L in common, got shape \(4,\) of layers/layer_0/b where L is 3",
        ),
        ({"layers/layer_0": {"b": np.float32(1)}}, r"got shape \(\) of layers/layer_0"),
    ],
)
def test_stacks_that_do_not_come_apart_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        modules.unstacked(params)
