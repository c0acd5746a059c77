import numpy as np
import pytest

from mha_haiku.training.tasks import text_tasks
from tests.training.tasks import hamlet


@pytest.fixture
def task(tmp_path):
    return hamlet.task_of(text_tasks.MaskedLanguageModel, tmp_path, 9)


def test_targets_are_all_windows_of_their_part_and_nothing_else(task, sampled):
    for data in (task.train_data, task.held_out_data):
        batch = sampled(task, data=data)
        found = {tuple(window) for window in batch.targets.tolist()}
        assert found == hamlet.windows(data, 9)


def test_what_does_not_count_is_left_as_it_was(task, sampled):
    batch = sampled(task)
    kept = batch.weights == 0
    np.testing.assert_array_equal(batch.inputs[kept], batch.targets[kept])
    assert set(batch.weights.ravel().tolist()) == {0.0, 1.0}


def test_fifteen_percent_count_and_are_hidden_as_in_bert(task, sampled):
    batch = sampled(task)
    chosen = batch.weights == 1
    np.testing.assert_allclose(chosen.mean(axis=0), np.full(9, 0.15), atol=0.015)
    inputs, targets = batch.inputs[chosen], batch.targets[chosen]
    masked = inputs == task.mask_token
    np.testing.assert_allclose(masked.mean(), 0.8, atol=0.015)
    # A random token is the one that was there once in so many times.
    replaced = ~masked & (inputs != targets)
    expected = 0.1 * (1 - 1 / task.num_classes)
    np.testing.assert_allclose(replaced.mean(), expected, atol=0.01)
    frequencies = np.bincount(inputs[replaced], minlength=task.num_classes)
    assert len(frequencies) == task.num_classes and frequencies.min() > 0


def test_mask_is_the_last_token_and_no_class(task):
    assert task.num_tokens == task.num_classes + 1
    assert task.mask_token == task.num_tokens - 1
    assert task.token_label(task.mask_token) == "[MASK]"
    labels = [task.class_label(c) for c in range(task.num_classes)]
    assert labels == [task.token_label(c) for c in range(task.num_classes)]


def test_users_text_may_have_masks(task):
    tokens = task.encode("to[MASK]be[MASK]")
    labels = [task.token_label(token) for token in tokens.tolist()]
    assert labels == ["t", "o", "[MASK]", "b", "e", "[MASK]"]
    assert task.encode("[MASK]").tolist() == [task.mask_token]


def test_worked_example_obeys_the_rule(task):
    rows = [row.split() for row in type(task).__doc__.splitlines()]
    inputs, targets, weights = (
        next(row[1:] for row in rows if row[:1] == [name])
        for name in ("inputs", "targets", "weights")
    )
    shown = [c.replace(" ", "␣") for c in hamlet.TEXT[:8]]
    for position, weight in enumerate(weights):
        expected = shown[position] if weight == "1" else "."
        assert targets[position] == expected
        assert weight == "1" or inputs[position] == shown[position]
    assert [inputs[t] for t in (1, 4, 6)] == ["[MASK]", "x", shown[6]]
