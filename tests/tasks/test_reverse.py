import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tokens


def test_targets_are_the_inputs_back_to_front(sampled):
    batch = sampled(uniform_tokens.Reverse(sequence_length=5, num_tokens=7))
    for inputs, targets, weights in list(zip(*batch[:3], strict=True))[:256]:
        assert targets.tolist() == list(reversed(inputs.tolist()))
        assert weights.tolist() == [1.0] * 5


def test_tokens_are_uniform(sampled):
    batch = sampled(uniform_tokens.Reverse(sequence_length=5, num_tokens=7))
    frequencies = np.bincount(batch.inputs.ravel()) / batch.inputs.size
    np.testing.assert_allclose(frequencies, np.full(7, 1 / 7), atol=0.015)


def test_worked_example_obeys_the_rule(worked_example):
    inputs, targets, weights = worked_example(
        uniform_tokens.Reverse(sequence_length=5, num_tokens=10)
    )
    assert targets.tolist() == inputs.tolist()[::-1]
    assert weights.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_length": 0, "num_tokens": 10},
        {"sequence_length": 2.5, "num_tokens": 10},
        {"sequence_length": 16, "num_tokens": 1},
        {"sequence_length": 16, "num_tokens": float("nan")},
    ],
)
def test_impossible_sizes_are_refused(options):
    with pytest.raises(ValueError, match="must be an integer from"):
        uniform_tokens.Reverse(**options)
