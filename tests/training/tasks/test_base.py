"""Properties of every task."""

import functools

import chex
import jax
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from tests import everyday
from tests.training.tasks.examples import sampled

DATA = {"path": "", "vocabulary_size": 300, "held_out_fraction": 0.1}
OPTIONS = {
    "reverse": {"sequence_length": 5, "num_tokens": 7},
    "copy": {"sequence_length": 5, "num_tokens": 7},
    "sort": {"sequence_length": 5, "num_tokens": 7},
    "histogram": {"sequence_length": 9, "num_tokens": 4},
    "associative_recall": {
        "sequence_length": 11,
        "num_pairs": 3,
        "num_keys": 7,
        "num_values": 4,
    },
    "bigram_backcopy": {"sequence_length": 11, "num_symbols": 6, "num_triggers": 2},
    "markov_chains": {"sequence_length": 11, "num_tokens": 4},
    "induction": {"sequence_length": 12, "num_tokens": 9},
    "modular_addition": {"modulus": 7, "train_fraction": 0.6},
    "parity": {"sequence_length": 5},
    "digits_anomaly": {"sequence_length": 6, "held_out_fraction": 0.2},
    "masked_language_model": {"sequence_length": 19, "tokenizer": "characters", **DATA},
    "language_model": {"sequence_length": 19, "tokenizer": "bpe", **DATA},
}
# Tasks with targets; `sentences` has separate tests.
every_task = pytest.mark.parametrize("name", list(OPTIONS))
sampled_tasks = pytest.mark.parametrize("name", list(OPTIONS)[:10])


@functools.cache
def make(name):
    return tasks.make(name, **OPTIONS[name])


def assert_equal(left, right):
    chex.assert_trees_all_equal(left, right)


@every_task
def test_example_has_the_declared_shapes_types_and_ranges(name):
    task = make(name)
    batch = sampled(task)
    size = len(batch.inputs)
    assert batch.weights.shape == batch.targets.shape
    assert batch.targets.dtype == np.int32 and batch.weights.dtype == np.float32
    assert batch.lengths is None
    assert set(np.unique(batch.weights)) <= {0.0, 1.0}
    assert batch.weights.sum() > 0
    if task.num_tokens is None:
        assert batch.inputs.shape == (size, task.sequence_length, task.feature_size)
        assert batch.inputs.dtype == np.float32
        assert batch.inputs.min() >= 0 and batch.inputs.max() <= 1
        assert batch.targets.shape == (size,)
        num_targets = task.sequence_length
    else:
        assert task.feature_size is None
        assert batch.inputs.shape == (size, task.sequence_length)
        assert batch.inputs.dtype == np.int32
        assert batch.inputs.min() == 0 and batch.inputs.max() == task.num_tokens - 1
        assert batch.targets.shape == (size, task.sequence_length)
        num_targets = task.num_classes
    assert batch.targets.min() >= 0 and batch.targets.max() < num_targets


@every_task
def test_example_depends_on_its_key_and_index_alone(name):
    whole = sampled(make(name))
    assert_equal(whole, sampled(make(name)))
    assert np.any(whole.inputs != sampled(make(name), seed=1).inputs)
    # Half of the indices, turned round, in the company of others.
    size = len(whole.inputs)
    indices = np.concatenate([np.arange(size // 2)[::-1], np.arange(size // 2) + size])
    part = sampled(make(name), indices=indices.astype(np.int32))
    assert_equal(
        jax.tree.map(lambda x: x[: size // 2][::-1], whole),
        jax.tree.map(lambda x: x[: size // 2], part),
    )
    assert np.any(part.inputs[size // 2 :] != whole.inputs[size // 2 :])


@pytest.mark.parametrize("name", everyday.some(OPTIONS, 5))
def test_compiled_and_uncompiled_give_the_same(name):
    task = make(name)
    key = jax.random.fold_in(jax.random.key(0), 3)
    expected = jax.tree.map(lambda x: x[3], sampled(task))
    assert_equal(expected, task.example(key, task.train_data))


@every_task
def test_double_precision_changes_no_type(name):
    task = make(name)
    key = jax.random.key(0)
    expected = jax.eval_shape(task.example, key, task.train_data)
    jax.config.update("jax_enable_x64", True)
    try:
        found = jax.eval_shape(task.example, key, task.train_data)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert [x.dtype for x in found[:3]] == [x.dtype for x in expected[:3]]


@every_task
def test_likeliest_class_decides_what_is_correct(name):
    task = make(name)
    batch = jax.tree.map(lambda x: x[:8], sampled(task))
    is_set = task.num_tokens is None
    num_logits = task.sequence_length if is_set else task.num_classes
    right = np.eye(num_logits, dtype=np.float32)[batch.targets]
    wrong = np.roll(right, 1, axis=-1)
    assert task.correct(right, batch).shape == batch.targets.shape
    assert np.all(task.correct(right, batch))
    assert not np.any(task.correct(wrong, batch))


def check_baseline(task, batches):
    """Asserts that the baseline is the best of the frequencies by position."""
    targets, weights = (
        np.concatenate([getattr(batch, part) for batch in batches])
        for part in ("targets", "weights")
    )
    accuracies, losses, totals = [], [], []
    for position in np.ndindex(targets.shape[1:]):
        counted = targets[:, *position][weights[:, *position] == 1]
        if len(counted):
            frequencies = np.unique_counts(counted).counts / len(counted)
            accuracies.append(frequencies.max())
            losses.append(-np.sum(frequencies * np.log(frequencies)))
            totals.append(len(counted))
    accuracy, loss = (np.average(x, weights=totals) for x in (accuracies, losses))
    np.testing.assert_allclose(task.baseline["accuracy"], accuracy, atol=0.015)
    np.testing.assert_allclose(task.baseline["loss"], loss, atol=0.01)


@pytest.mark.parametrize("name", [*list(OPTIONS)[:8], "digits_anomaly"])
def test_baseline_is_the_best_that_no_look_at_the_input_can_do(name):
    task = make(name)
    # All of the table of modular addition: a part of it has sums of its own frequency.
    data = task.train_data
    if name == "modular_addition":
        data = np.concatenate([task.train_data, task.held_out_data])
    batches = [sampled(task, data=data, seed=seed) for seed in range(4)]
    assert task.baseline_name == "chance"
    check_baseline(task, batches)


@every_task
def test_equal_tasks_are_equal_static_values(name):
    task = tasks.make(name, **OPTIONS[name])
    assert task == make(name) and hash(task) == hash(make(name))


@every_task
def test_every_position_and_class_has_a_text(name):
    task = make(name)
    labels = task.labels(jax.tree.map(lambda x: x[0], sampled(task)))
    assert len(labels) == task.sequence_length
    assert all(isinstance(label, str) and label for label in labels)
    classes = [task.class_label(c) for c in range(task.num_classes)]
    assert all(isinstance(label, str) and label for label in classes)


@sampled_tasks
def test_labels_and_ids_are_both_understood_as_text(name):
    task = make(name)
    example = jax.tree.map(lambda x: x[0], sampled(task))
    for words in (task.labels(example), map(str, example.inputs.tolist())):
        tokens = task.encode(" ".join(words))
        np.testing.assert_array_equal(tokens, example.inputs)
        assert tokens.dtype == np.int32


@pytest.mark.parametrize("text", [" ", "-1 0", "99", "1.5", "x", "9" * 5000])
def test_words_that_are_no_tokens_are_refused(text):
    assert make("reverse").encode("0 " * 6).tolist() == [0] * 6  # of any length
    with pytest.raises(checks.ConfigError, match="ids from 0 to 6 or labels of rev"):
        make("reverse").encode(text)
