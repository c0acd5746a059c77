"""Each edit against weights changed by hand, or the formula with values replaced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import models
from mha_haiku.core import sites
from mha_haiku.lab.heads import edits
from tests import everyday, oracles
from tests.tiny_models import (
    B,
    D,
    H,
    K,
    T,
    build,
    config,
    counted,
    inputs_of,
    oracle_inputs,
    random_parameters,
)

L = 2
LAYER = "encoder/layer_1"
HEADS = f"{LAYER}/attention/heads"

KINDS = {
    "looped": {"num_layers": L},
    "scanned": {"num_layers": L, "scan_layers": True},
    "encoder-decoder": {
        "num_layers": L,
        "family": "encoder_decoder",
        "decoder__num_layers": 1,
    },
}


def _normal(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape).astype(np.float32)


class Case:
    """A model, its inputs, and its formula."""

    def __init__(self, kind):
        self.of = config(**KINDS[kind])
        self.given = inputs_of(self.of)
        self.length = self.given["inputs"].shape[1]
        model = build(self.of)
        self.apply = functools.partial(model.apply, is_training=False)
        looped = build(config(**KINDS[kind] | {"scan_layers": False}))
        self.looped = random_parameters(looped, self.given)
        is_scanned = self.of.scan_layers
        self.params = models.stacked(self.looped) if is_scanned else self.looped

    def run(self, changes):
        """Logits of the edited model."""
        run = jax.jit(sites.edit(self.apply, changes))
        output = run(self.params, None, **self.given)
        return output.logits[counted(self.of, self.given)]

    def wanted(self, changes, params=None):
        """The same by the formula: functions of values, by the names of sites."""
        logits, _ = oracles.recorded(
            self.looped if params is None else params,
            config=self.of,
            changes=changes,
            **oracle_inputs(self.given),
        )
        return logits[counted(self.of, self.given)]

    def check(self, changes, wanted, params=None):
        wanted = self.wanted(wanted, params)
        assert np.abs(wanted - self.wanted({})).max() > 1e-4
        np.testing.assert_allclose(self.run(changes), wanted, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def cases():
    return {kind: Case(kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def case(request, cases):
    return cases[request.param]


def _with_heads(heads, value):
    def change(x):
        x = x.copy()
        x[:, :, heads] = value
        return x

    return change


@pytest.mark.slow
def test_ablated_heads_are_those_without_an_output(case):
    """Their rows of the last map are 0."""
    linear = case.looped[f"{LAYER}/attention/linear"]
    rows = linear["w"].reshape(H, K, D).copy()
    rows[[0, 2]] = 0
    without = case.looped | {
        f"{LAYER}/attention/linear": linear | {"w": rows.reshape(H * K, D)}
    }
    case.check(edits.ablate("encoder/layer_1/attention", [0, 2]), {}, without)


@pytest.mark.parametrize("shape", [(K,), (B, -1, 1, K)])
def test_ablated_heads_may_pass_on_a_value(shape, cases):
    case = cases["looped"]
    shape = [case.length if n == -1 else n for n in shape]
    value = _normal(*shape)
    case.check(edits.ablate(1, 2, value), {HEADS: _with_heads([2], value)})


@pytest.mark.parametrize("kind", ["looped", "scanned"])
@pytest.mark.parametrize(
    "shape", everyday.some(map(pytest.param, [(B,), (), (B, T)]), 1)
)
def test_gates_multiply_heads(kind, shape, cases):
    gates = _normal(L, *shape, H)
    aligned = gates.reshape(L, *shape, *(1,) * (2 - len(shape)), H, 1)
    changes = {
        f"encoder/layer_{i}/attention/heads": lambda x, i=i: x * aligned[i]
        for i in range(L)
    }
    cases[kind].check(edits.gate(gates), changes)
    if not shape:
        np.testing.assert_array_equal(
            cases[kind].run(edits.gate(list(gates))), cases[kind].run(edits.gate(gates))
        )


@pytest.mark.parametrize(("heads", "got"), [(H, "3"), ([0, -1], "-1")])
def test_heads_that_are_not_there_are_refused(heads, got):
    (change,) = edits.ablate(0, heads).values()
    with pytest.raises(ValueError, match=f"heads .* 0 to 2, got {got}"):
        change(np.zeros((B, T, H, K), np.float32))


def test_layers_without_gates_are_refused(cases):
    gates = np.ones((1, H), np.float32)
    with pytest.raises(ValueError, match="layer of gates .* 0 to 0, got 1"):
        cases["looped"].run(edits.gate(gates))
    assert np.isnan(cases["scanned"].run(edits.gate(gates))).all()


@pytest.mark.slow
def test_heads_may_be_traced():
    values = jnp.ones((B, T, H, K))
    ablated = jax.vmap(lambda h: edits.ablate(0, h)["layer_0/attention/heads"](values))
    np.testing.assert_array_equal(ablated(jnp.arange(H))[:, 0, 0, :, 0], 1 - np.eye(H))


def test_parts_that_are_alike_are_edited_as_one(case):
    """And others each by itself."""
    names = [f"{each.path}/heads" for each in models.heads_of_layers(case.of)]
    given = [_normal(1, 1, H, 1, seed=i) for i in range(len(names))]
    made = edits.on_parts(names, given, jnp.multiply)
    assert len(made) == 1
    wanted = {
        name: lambda x, gate=gate: x * gate
        for name, gate in zip(names, given, strict=True)
    }
    case.check(made, wanted)


def test_gated_is_between_the_value_and_its_replacement():
    values, replacement = _normal(B, T, H, K), _normal(H, K, seed=1)
    gates = np.float32(np.random.default_rng(2).uniform(size=(B, H)))
    found = edits.gated(values, gates, replacement)
    each = gates[:, None, :, None]
    np.testing.assert_allclose(
        found, each * values + (1 - each) * replacement, rtol=1e-5, atol=1e-6
    )
    found = edits.gated(values, gates, 2.0)
    np.testing.assert_allclose(found, each * values + (1 - each) * 2, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"\(3,\), \(2, 3\) or \(2, 5, 3\), got \(2,\)"
    ):
        edits.gated(values, np.ones(2))
