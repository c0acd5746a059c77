"""Drift: vectors of texts, before and after an intervention."""

import jax
import numpy as np
import pytest

from mha_haiku import heads, models, tasks
from tests.tiny_runs import model_config

B, T, D, H, C = 3, 5, 8, 4, 7


@pytest.fixture(scope="module")
def sentences():
    """A model without logits, its parameters, and a batch with padding."""
    config = model_config(
        num_layers=2,
        model_size=D,
        embedding__max_length=T,
        attention__num_heads=H,
        feed_forward__hidden_size=6,
        output__logits=False,
    )
    model = models.build(config, num_tokens=C, feature_size=None, num_classes=C)
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, C, (B, T)).astype(np.int32)
    lengths = np.array([5, 2, 4], np.int32)
    params = jax.jit(model.init)(jax.random.key(1), inputs, lengths)
    params = jax.tree.map(lambda x: 2 * np.asarray(x), params)
    nothing = np.zeros((B, T))
    example = tasks.Example(inputs, nothing.astype(int), nothing, lengths)
    return config, model, params, example


def _vectors(output, lengths):
    """The oracle: means over valid positions, float64."""
    outputs = np.asarray(output.output, np.float64)
    return np.array([x[:n].mean(0) for x, n in zip(outputs, lengths, strict=True)])


def _drift(one, other):
    cosine = (one * other).sum(-1)
    return 1 - cosine / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


def test_drift_by_hand():
    example = tasks.Example(None, np.array([[2.0, 0], [0, 3], [1, 1], [0, 0]]), None)
    logits = np.array([[4.0, 0], [1, 0], [-2, -2], [1, 0]])
    found = heads.metrics.drift(jax.numpy.array(logits), example)
    np.testing.assert_allclose(found, [0, 1, 2, 0.5], atol=1e-6)


@pytest.mark.slow
def test_drift_of_ablated_heads_is_the_cosine_that_a_pruned_model_loses(sentences):
    config, model, params, example = sentences
    of = heads.measured_by_drift(model, params, [example])
    before = _vectors(heads.model_runs.run(model, params, example), example.lengths)
    pruned, own = heads.prune(params, config, [[0, 1, 2], [0, 2, 3]])
    small = models.build(own, num_tokens=C, feature_size=None, num_classes=C)
    output = heads.model_runs.run(small, pruned, example)
    after = _vectors(output, example.lengths)
    both = heads.gated_metric(of, 1 - np.eye(H)[None, [3, 1]])
    wanted = _drift(before, after)
    assert wanted.min() > 1e-4
    np.testing.assert_allclose(both[:, 0], wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_shares_of_the_drift_add_up_though_it_has_no_slope(sentences):
    _, model, params, example = sentences
    of = heads.measured_by_drift(model, params, [example])
    shares = heads.attribution(of, points=64).per_example.sum((1, 2))
    all_ablated = heads.gated_metric(of, np.zeros((1, 2, H)))[:, 0]
    np.testing.assert_allclose(shares, all_ablated, rtol=1e-2)
    with pytest.raises(ValueError, match="where drift is smallest"):
        heads.gradient(of)
