"""A pruned model equals the model with these heads ablated, and is smaller."""

import functools

import chex
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from mha_haiku import heads, models
from mha_haiku.core import sites
from tests import everyday
from tests.lab.heads.small_models import (
    B,
    D,
    H,
    L,
    T,
    build,
    config,
    example,
    random_params,
)

KINDS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "one group": {"num_key_value_heads": 1, "with_bias": False},
    "alibi": {"positions": "alibi"},
    "t5": {"positions": "t5", "family": "encoder"},
    "rotary": {"positions": "rotary", "qk_norm": True, "num_key_value_heads": 2},
    "smeared": {"smear_keys": True, "num_key_value_heads": 2},
    "sinks, gates by head": {"attention__sinks": "learned", "attention__gate": "head"},
    "biases apart": {"attention__with_bias": False, "attention__residual": False},
    "tied, window": {
        "activation": "geglu",
        "attention__window": 2,
        "output__tied": True,
    },
    "post": {"norm_position": "post", "activation": "swiglu"},
}


@functools.cache
def _applied(kind):
    of = config(**KINDS[kind])
    model, params = build(of), random_params(of)

    @jax.jit
    def run(params, inputs, lengths, gates):
        apply = sites.edit(model.apply, heads.edits.gate(gates))
        return apply(params, None, inputs, lengths=lengths, is_training=False).logits

    return of, params, run


def _logits(of, params, batch):
    run = functools.partial(build(of).apply, is_training=False)
    return np.asarray(run(params, None, batch.inputs, lengths=batch.lengths).logits)


@pytest.mark.parametrize("kind", everyday.some(KINDS, 1))
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    keep=st.lists(st.lists(st.integers(0, H - 1), unique=True), min_size=L, max_size=L)
)
def test_pruned_is_gated(kind, keep):
    of, params, run = _applied(kind)
    batch = example(lengths=np.array([T, 2, 4]))
    gates = heads.open_gates(of, keep)
    wanted = run(params, batch.inputs, batch.lengths, np.stack(gates))
    pruned, pruned_config = heads.prune(params, of, keep)
    found = _logits(pruned_config, pruned, batch)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * scale)
    # What the config describes is what the parameters are.
    shapes = jax.eval_shape(build(pruned_config).init, jax.random.key(0), batch.inputs)
    assert jax.tree.map(np.shape, pruned) == jax.tree.map(np.shape, shapes)
    names = [list(layer.names) for layer in models.heads_of_layers(pruned_config)]
    assert names == [sorted(row) for row in keep]


def test_pruning_twice_is_pruning_once():
    of = config(num_key_value_heads=2, positions="alibi")
    params = random_params(of)
    once, once_config = heads.prune(params, of, [[3], [0, 2], [1]])
    half, half_config = heads.prune(params, of, [[2, 3], [0, 2, 3], [1, 2]])
    twice, twice_config = heads.prune(half, half_config, [[3], [0, 2], [1]])
    chex.assert_trees_all_equal(twice, once)
    assert twice_config.to_json() == once_config.to_json()


def test_scanned_layers_and_heads_in_another_order_make_the_same_model():
    of, params = config(), random_params(config())
    wanted, wanted_config = heads.prune(params, of, [[0], [1, 2, 3], []])
    stacked = models.stacked(params), config(scan_layers=True)
    for given, keep in (
        (stacked, [[0], [1, 2, 3], []]),
        ((params, of), [[0], [3, 1, 2], []]),
    ):
        found, found_config = heads.prune(*given, keep)
        chex.assert_trees_all_equal(found, wanted)
        assert found_config.to_json() == wanted_config.to_json()


def test_gates_multiplied_into_parameters_are_gates():
    of = config()
    params, batch = random_params(of), example()
    gates = np.random.default_rng(4).uniform(size=(L, H)).astype(np.float32)
    run = functools.partial(build(of).apply, is_training=False)
    gated = sites.edit(run, heads.edits.gate(gates))
    wanted = gated(params, None, batch.inputs).logits
    found = _logits(of, heads.scaled(params, of, gates), batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_gates_are_multiplied_into_scanned_layers():
    of, gates = config(), np.arange(L * H).reshape(L, H)
    params = random_params(of)
    scaled = heads.scaled(models.stacked(params), config(scan_layers=True), gates)
    wanted = models.stacked(heads.scaled(params, of, gates))
    jax.tree.map(np.testing.assert_array_equal, scaled, wanted)


@pytest.mark.slow
def test_maps_of_a_layer_without_heads_are_of_no_heads():
    of = config()
    pruned, pruned_config = heads.prune(random_params(of), of, [[0], [], [1, 2]])
    run = functools.partial(build(pruned_config).apply, is_training=False)
    maps = jax.jit(run)(pruned, None, example().inputs).maps
    assert [each.shape for each in maps] == [(B, h, T, T) for h in (1, 0, 2)]
    assert maps[1].weights().shape == (B, 0, T, T)
    found = maps[1].statistics(tokens=example().inputs, pooled=(2, 3))
    assert found.entropy.shape == (B, 0) and found.received.shape == (B, 0, T)
    assert found.pooled.shape == (B, 0, 2, 3)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([[0], [1]], "entry for each of the 3 layers, got 2"),
        ([[0], [4], []], r"layer 1 must keep some of its heads \[0, 1, 2, 3\]"),
        ([[0, 0], [1], []], r"layer 0 must keep .* each once, got \[0, 0\]"),
    ],
)
def test_heads_that_are_not_there_are_refused(keep, message):
    of = config()
    with pytest.raises(ValueError, match=message):
        heads.prune(random_params(of), of, keep)


def _renamed(params):
    return {name.replace("layer_1/", "block_1/"): own for name, own in params.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda params, of: heads.prune(params, of, [[0]] * L),
        lambda params, of: heads.scaled(params, of, np.ones((L, H))),
    ],
    ids=["prune", "scaled"],
)
def test_parameters_of_other_names_are_refused(change):
    """Rather than left as they are in silence."""
    of = config()
    params = random_params(of)
    message = r"must have heads in each layer.*layers \[1\] have none, .*block_1/"
    with pytest.raises(ValueError, match=message):
        change(_renamed(params), of)
    more = params | {f"encoder/layer_{L}/norm_1": {"scale": np.ones(D)}}
    with pytest.raises(ValueError, match="must have 3 layers, got 'encoder/layer_3"):
        change(more, of)
    fewer = {name: own for name, own in params.items() if "layer" not in name}
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] have none"):
        change(fewer, of)
