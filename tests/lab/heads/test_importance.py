"""Each measure is its definition, computed in float64 NumPy by brute force."""

import numpy as np
import pytest

from mha_haiku import heads
from tests import everyday
from tests.lab.heads.small_models import (
    B,
    H,
    L,
    build,
    config,
    oracle,
)

N = 2 * B


def _loss(params, batch, gates, passed=None):
    logits, _ = oracle(config(), params, batch, gates, passed)
    total = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    return ((total - chosen) * batch.weights).sum(-1)


def _outputs(params, batch):
    """Returns what the heads of each layer pass on."""
    _, values = oracle(config(), params, batch)
    return [values[f"encoder/layer_{i}/attention/heads"] for i in range(L)]


def _without(i, h):
    gates = np.ones((L, H))
    gates[i, h] = 0
    return gates


ABLATION_VALUES = ["zero", "mean", "resample"]


_means = {}  # kept: programs are compiled for each ablation value


def _ablation_value(subject, name):
    if name != "mean":
        return getattr(heads.ablation_values, name)
    if subject.model not in _means:
        _means[subject.model] = heads.ablation_values.mean(
            subject.model, subject.params, subject.batches
        )
    return _means[subject.model]


def _replacements(subject, name):
    """Returns for each batch what replaces ablated heads, by the oracle."""
    if name == "zero":
        return [None] * len(subject.batches)
    clean = [_outputs(subject.params, batch) for batch in subject.batches]
    if name == "resample":
        return [[np.roll(x, -1, axis=0) for x in of_batch] for of_batch in clean]
    means = [
        np.concatenate(layers).mean((0, 1), keepdims=True)
        for layers in zip(*clean, strict=True)
    ]
    return [means] * len(subject.batches)


@pytest.mark.parametrize("name", everyday.some(ABLATION_VALUES, 1))
def test_ablation_is_the_change_of_the_loss(subject, name):
    found = heads.ablation(subject, ablation_value=_ablation_value(subject, name))
    wanted = np.zeros((N, L, H))
    replacements = _replacements(subject, name)
    for b, (batch, other) in enumerate(zip(subject.batches, replacements, strict=True)):
        before = _loss(subject.params, batch, np.ones((L, H)))
        for i, h in np.ndindex(L, H):
            after = _loss(subject.params, batch, _without(i, h), other)
            wanted[b * B : (b + 1) * B, i, h] = after - before
    assert np.abs(wanted).max() > 0.05
    np.testing.assert_allclose(found.per_example, wanted, atol=2e-5)
    np.testing.assert_allclose(found.mean, wanted.mean(0), atol=2e-5)
    errors = wanted.std(0, ddof=1) / np.sqrt(N)
    np.testing.assert_allclose(found.standard_error, errors, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero", "resample"])
def test_gradient_is_the_slope_at_open_gates(subject, name):
    found = heads.gradient(subject, ablation_value=_ablation_value(subject, name))
    replacements = _replacements(subject, name)
    step, wanted = 1e-4, np.zeros((N, L, H))
    for b, (batch, other) in enumerate(zip(subject.batches, replacements, strict=True)):
        for i, h in np.ndindex(L, H):
            sides = []
            for sign in (1, -1):
                gates = np.ones((L, H))
                gates[i, h] += sign * step
                sides.append(_loss(subject.params, batch, gates, other))
            slope = (sides[0] - sides[1]) / (2 * step)
            wanted[b * B : (b + 1) * B, i, h] = np.abs(slope)
    np.testing.assert_allclose(found.per_example, wanted, atol=3e-5)


@pytest.mark.slow
def test_attributions_add_up_to_ablating_all(subject):
    found = heads.attribution(subject, points=24)
    ends = heads.gated_metric(subject, np.stack([np.ones((L, H)), np.zeros((L, H))]))
    total = found.per_example.sum((1, 2))
    np.testing.assert_allclose(total, ends[:, 1] - ends[:, 0], atol=2e-3)
    assert np.abs(found.per_example.mean(0)).max() > 0.01


@pytest.mark.slow
def test_attribution_is_the_integral_of_slopes(subject):
    found = heads.attribution(
        subject, ablation_value=_ablation_value(subject, "mean"), points=2
    )
    nodes, weights = np.polynomial.legendre.leggauss(2)
    nodes, weights = (nodes + 1) / 2, weights / 2
    batch, other = subject.batches[0], _replacements(subject, "mean")[0]
    step = 1e-4
    for i, h in [(0, 1), (2, 3)]:
        share = 0
        for node, weight in zip(nodes, weights, strict=True):
            sides = []
            for sign in (1, -1):
                gates = np.full((L, H), node)
                gates[i, h] += sign * step
                sides.append(_loss(subject.params, batch, gates, other))
            share = share - weight * (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found.per_example[:B, i, h], share, atol=3e-5)


@pytest.mark.slow
def test_confidence_is_the_mean_largest_weight(subject):
    found = heads.confidence(subject)
    for b, batch in enumerate(subject.batches):
        output = subject.model.apply(
            subject.params, None, batch.inputs, is_training=False
        )
        for i, each in enumerate(output.maps):
            wanted = np.asarray(each.weights()).max(-1).mean(-1)
            rows = found.per_example[b * B : (b + 1) * B, i]
            np.testing.assert_allclose(rows, wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero", "mean"])
def test_patterns_of_gates_are_those_of_the_oracle(subject, name):
    generator = np.random.default_rng(3)
    gates = (generator.uniform(size=(5, L, H)) < 0.5).astype(np.float32)
    found = heads.gated_metric(
        subject, gates, ablation_value=_ablation_value(subject, name)
    )
    replacements = _replacements(subject, name)
    wanted = np.concatenate(
        [
            np.stack([_loss(subject.params, batch, row, other) for row in gates], -1)
            for batch, other in zip(subject.batches, replacements, strict=True)
        ]
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "ablation_value"),
    [
        (heads.ablation, "zero"),
        (heads.gradient, "resample"),
        (heads.attribution, "mean"),
        (heads.confidence, "zero"),
    ],
)
def test_layers_with_fewer_heads_leave_places_empty(subject, measure, ablation_value):
    keep = [[0, 2], [], [1, 2, 3]]
    params, pruned = heads.prune(subject.params, config(), keep)
    of = subject._replace(model=build(pruned), params=params)
    found = measure(of, ablation_value=_ablation_value(of, ablation_value))
    empty = np.isnan(found.per_example)
    assert found.per_example.shape == (N, L, 3)
    np.testing.assert_array_equal(empty[0], [[0, 0, 1], [1, 1, 1], [0, 0, 0]])
    assert (empty == empty[0]).all()
    if measure is heads.ablation:
        # The same as gates of zero from the start, and one more ablated.
        gates = np.stack(heads.open_gates(config(), keep))
        ablated = gates.copy()
        ablated[0, 0] = 0
        sides = heads.gated_metric(subject, np.stack([gates, ablated]))
        change = sides[:, 1] - sides[:, 0]
        np.testing.assert_allclose(found.per_example[:, 0, 0], change, atol=1e-5)
        # Gates beyond a layer's own heads are not looked at.
        own = np.float32([[0, 1, 9], [9, 9, 9], [1, 1, 1]])
        np.testing.assert_allclose(
            heads.gated_metric(of, own[None])[:, 0], sides[:, 1], 1e-5
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda of: heads.gradient(of._replace(batches=[])), "batches must not be"),
        (lambda of: heads.ablation_values.mean(*of[::2], []), "batches must not be"),
        (lambda of: heads.attribution(of, points=0), "points must be at least 1"),
    ],
)
def test_nothing_to_average_is_refused(subject, call, message):
    with pytest.raises(ValueError, match=message):
        call(subject)


@pytest.mark.parametrize("shape", [(2, L - 1, H), (2, L + 1, H), (2, L, H - 1)])
def test_gates_of_other_heads_are_refused(subject, shape):
    with pytest.raises(
        ValueError, match="gates must be of .* attention parts of up to"
    ):
        heads.gated_metric(subject, np.ones(shape))


@pytest.mark.parametrize(
    "measure",
    [
        *(entry.measure for entry in heads.MEASURES.values()),
        heads.greedy_order,
        lambda of: heads.roles(of.model, of.params, of.batches),
        lambda of: heads.ablation_values.mean(of.model, of.params, of.batches),
    ],
)
def test_batches_that_can_be_gone_through_once_are_refused(subject, measure):
    batches = (batch for batch in subject.batches)
    with pytest.raises(TypeError, match=r"got generator; list\(batches\) makes one"):
        measure(subject._replace(batches=batches))
