"""The class of the largest priority, by a loop over items."""

import numpy as np
import pytest

from mha_haiku import tasks


def test_the_target_is_the_class_of_the_largest_priority_among_the_items(sampled):
    task = tasks.make("max_retrieval", min_items=2, max_items=5, num_classes=3)
    assert (task.sequence_length, task.feature_size) == (6, 5)
    batch = sampled(task)
    counts = batch.lengths - 1
    assert set(counts) == {2, 3, 4, 5}
    np.testing.assert_array_equal(batch.inputs[:, 0], [[1, 0, 0, 0, 0]] * len(counts))
    for inputs, count, target in zip(
        batch.inputs[:500], counts, batch.targets, strict=False
    ):
        assert not inputs[1 + count :].any()
        best = max(range(1, 1 + count), key=lambda i: inputs[i, 1])
        assert inputs[best, 2 + target] == 1
        assert inputs[1 : 1 + count, 2:].sum() == count
    assert np.bincount(batch.targets).min() > len(counts) / 4  # uniform over 3


def test_more_items_at_least_than_at_most_are_refused():
    with pytest.raises(ValueError, match="min_items"):
        tasks.make("max_retrieval", min_items=6, max_items=5)
