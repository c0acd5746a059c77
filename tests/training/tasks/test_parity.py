import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tasks


def test_targets_are_the_parities_so_far(sampled):
    batch = sampled(uniform_tasks.Parity(sequence_length=5))
    np.testing.assert_array_equal(batch.targets, np.cumsum(batch.inputs, axis=1) % 2)
    np.testing.assert_array_equal(batch.weights, np.ones((4096, 5)))


def test_bits_are_fair_and_independent(sampled):
    batch = sampled(uniform_tasks.Parity(sequence_length=5))
    numbers = batch.inputs @ 2 ** np.arange(5)
    frequencies = np.bincount(numbers, minlength=32) / len(numbers)
    np.testing.assert_allclose(frequencies, np.full(32, 1 / 32), atol=0.012)


def test_a_start_token_counts_for_nothing(sampled):
    inputs, targets, weights = sampled(
        uniform_tasks.Parity(sequence_length=5, has_start=True)
    )[:3]
    np.testing.assert_array_equal(inputs[:, 0], 2)
    bits = inputs * (inputs < 2)
    np.testing.assert_array_equal(targets, np.cumsum(bits, axis=1) % 2)
    np.testing.assert_array_equal(weights, np.tile(np.arange(5) > 0, (4096, 1)))
    np.testing.assert_allclose(inputs[:, 1:].mean(0), 0.5, atol=0.03)


def test_worked_example_obeys_the_rule(worked_example):
    inputs, targets, weights = worked_example(uniform_tasks.Parity(sequence_length=6))
    assert targets.tolist() == (np.cumsum(inputs) % 2).tolist()
    assert weights.tolist() == [1.0] * 6


def test_classes_read_even_and_odd():
    task = uniform_tasks.Parity(sequence_length=6)
    assert [task.class_label(c) for c in range(2)] == ["even", "odd"]


def test_impossible_length_is_refused():
    with pytest.raises(ValueError, match="^sequence_length must be"):
        uniform_tasks.Parity(sequence_length=0)
    with pytest.raises(ValueError, match="^sequence_length must be"):
        uniform_tasks.Parity(sequence_length=1, has_start=True)
