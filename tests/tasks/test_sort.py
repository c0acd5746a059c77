import itertools
import math
from collections import Counter

import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tokens


def test_targets_are_the_inputs_in_order(sampled):
    batch = sampled(uniform_tokens.Sort(sequence_length=5, num_tokens=7))
    for inputs, targets in list(zip(*batch[:2], strict=True))[:256]:
        assert targets.tolist() == sorted(inputs.tolist())
    np.testing.assert_array_equal(batch.weights, np.ones((4096, 5)))


def test_worked_example_obeys_the_rule(worked_example):
    task = uniform_tokens.Sort(sequence_length=5, num_tokens=10)
    inputs, targets, weights = worked_example(task)
    assert targets.tolist() == sorted(inputs.tolist())
    assert weights.tolist() == [1.0] * 5


def test_baseline_is_that_of_all_sequences_counted_by_hand():
    length, num_tokens = 4, 3
    accuracies, losses = [], []
    sequences = list(itertools.product(range(num_tokens), repeat=length))
    for position in range(length):
        counts = Counter(sorted(sequence)[position] for sequence in sequences)
        parts = [count / len(sequences) for count in counts.values()]
        accuracies.append(max(parts))
        losses.append(-sum(part * math.log(part) for part in parts))
    baseline = uniform_tokens.Sort(
        sequence_length=length, num_tokens=num_tokens
    ).baseline
    np.testing.assert_allclose(baseline["accuracy"], np.mean(accuracies), rtol=1e-12)
    np.testing.assert_allclose(baseline["loss"], np.mean(losses), rtol=1e-12)


@pytest.mark.parametrize("name", ["sequence_length", "num_tokens"])
def test_impossible_sizes_are_refused(name):
    options = {"sequence_length": 5, "num_tokens": 7} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be an integer from"):
        uniform_tokens.Sort(**options)
