import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tokens


def test_targets_are_the_inputs(sampled):
    batch = sampled(uniform_tokens.Copy(sequence_length=5, num_tokens=7))
    np.testing.assert_array_equal(batch.targets, batch.inputs)
    np.testing.assert_array_equal(batch.weights, np.ones((4096, 5)))


def test_worked_example_obeys_the_rule(worked_example):
    task = uniform_tokens.Copy(sequence_length=5, num_tokens=10)
    inputs, targets, weights = worked_example(task)
    assert targets.tolist() == inputs.tolist()
    assert weights.tolist() == [1.0] * 5


@pytest.mark.parametrize("name", ["sequence_length", "num_tokens"])
def test_impossible_sizes_are_refused(name):
    options = {"sequence_length": 5, "num_tokens": 7} | {name: -1}
    with pytest.raises(ValueError, match=f"^{name} must be an integer from"):
        uniform_tokens.Copy(**options)
