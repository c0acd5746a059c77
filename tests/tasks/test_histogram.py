import itertools
import math
from collections import Counter

import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tokens


def occurrences(inputs):
    counts = Counter(inputs.tolist())
    return [counts[token] for token in inputs.tolist()]


def test_targets_count_each_token(sampled):
    batch = sampled(uniform_tokens.Histogram(sequence_length=9, num_tokens=4))
    for inputs, targets in list(zip(*batch[:2], strict=True))[:256]:
        assert targets.tolist() == occurrences(inputs)
    np.testing.assert_array_equal(batch.weights, np.ones((4096, 9)))


def test_worked_example_obeys_the_rule(worked_example):
    task = uniform_tokens.Histogram(sequence_length=5, num_tokens=10)
    inputs, targets, weights = worked_example(task)
    assert targets.tolist() == occurrences(inputs)
    assert weights.tolist() == [1.0] * 5


def test_every_count_is_a_class():
    task = uniform_tokens.Histogram(sequence_length=9, num_tokens=4)
    assert task.num_classes == 10
    assert task.class_label(9) == "9"


def test_baseline_is_that_of_all_sequences_counted_by_hand():
    length, num_tokens = 5, 3
    counts = Counter()
    for sequence in itertools.product(range(num_tokens), repeat=length):
        counts.update(occurrences(np.array(sequence)))
    parts = [count / counts.total() for count in counts.values()]
    task = uniform_tokens.Histogram(sequence_length=length, num_tokens=num_tokens)
    loss = -sum(part * math.log(part) for part in parts)
    np.testing.assert_allclose(task.baseline["accuracy"], max(parts), rtol=1e-12)
    np.testing.assert_allclose(task.baseline["loss"], loss, rtol=1e-12)


@pytest.mark.parametrize("name", ["sequence_length", "num_tokens"])
def test_impossible_sizes_are_refused(name):
    options = {"sequence_length": 5, "num_tokens": 7} | {name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be an integer from"):
        uniform_tokens.Histogram(**options)
