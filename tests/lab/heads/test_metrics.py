"""Metrics of examples and means over them, against sums written out in float64."""

import numpy as np
import pytest

from mha_haiku import heads, tasks

B, T, C = 3, 4, 5


def _batch(shape):
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((*shape, C)).astype(np.float32)
    targets = generator.integers(0, C, shape).astype(np.int32)
    weights = generator.integers(0, 3, shape).astype(np.float32)
    weights[0] = 0
    return logits, tasks.Example(np.zeros(shape), targets, weights, None)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(B, T), (B,)])
def test_metrics_are_weighted_means_over_an_example(shape):
    logits, example = _batch(shape)
    shares = np.exp(np.float64(logits))
    shares /= shares.sum(-1, keepdims=True)
    for b in range(B):
        loss = right = total = 0.0
        for t in np.ndindex(shape[1:]):
            weight, target = example.weights[(b, *t)], example.targets[(b, *t)]
            loss -= weight * np.log(shares[(b, *t, target)])
            right += weight * (logits[(b, *t)].argmax() == target)
            total += weight
        total = max(total, 1)
        found = heads.metrics.loss(logits, example)[b]
        np.testing.assert_allclose(found, loss / total, rtol=1e-5)
        mistakes = heads.metrics.mistakes()(logits, example)[b]
        if example.weights[b].sum():
            np.testing.assert_allclose(mistakes, 1 - right / total, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_scale_of_weights_changes_no_mean(scale):
    logits, example = _batch((B, T))
    scaled = example._replace(weights=example.weights * np.float32(scale))
    for metric in (heads.metrics.loss, heads.metrics.mistakes()):
        found, expected = metric(logits, scaled), metric(logits, example)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_does_not_count_is_not_felt():
    logits, example = _batch((B, T))
    logits[example.weights == 0] = np.inf
    assert np.isfinite(heads.metrics.loss(logits, example)).all()


def test_means_leave_out_what_is_not_there():
    values = np.array([[1.0, np.nan, 2.0], [3.0, np.nan, np.nan], [8.0, np.nan, 4.0]])
    nan = np.nan
    np.testing.assert_allclose(heads.means.mean(values), [4, nan, 3])
    # Spreads 13 and 2 of 3 and 2 values.
    wanted = [np.sqrt(13 / 3), nan, np.sqrt(2 / 2)]
    np.testing.assert_allclose(heads.means.standard_error(values), wanted)
    assert np.isnan(heads.means.standard_error(values[:1])).all()
