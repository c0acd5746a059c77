"""Properties of every sequence-to-sequence task."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.tasks import sampling

OPTIONS = {
    "reverse_seq2seq": {"min_length": 2, "max_length": 5, "num_tokens": 7},
    "number_words": {"largest": 150},
    "pronounce": {"longest": 6},
}
every_task = pytest.mark.parametrize("name", list(OPTIONS))


@functools.cache
def make(name):
    return tasks.make(name, **OPTIONS[name])


def first(batch, index=0):
    return jax.tree.map(lambda x: x[index], batch)


@pytest.mark.slow
@every_task
def test_example_has_the_declared_shapes_types_and_ranges(name, sampled):
    task, batch = make(name), sampled(make(name))
    size, source, target = len(batch.inputs), task.sequence_length, task.target_length
    chex.assert_shape(batch.inputs, (size, source))
    chex.assert_shape(batch[1:3] + batch[4:5], (size, target))
    chex.assert_shape([batch.lengths, batch.decoder_lengths], (size,))
    assert [each.dtype for each in batch[:6]] == [
        np.float32 if each is batch.weights else np.int32 for each in batch[:6]
    ]
    assert 0 <= batch.inputs.min() and batch.inputs.max() < task.num_tokens
    assert batch.targets.min() >= 0 and batch.targets.max() == task.end_token
    assert 1 <= batch.lengths.min() and batch.lengths.max() <= source
    assert batch.decoder_lengths.max() <= target


@every_task
def test_decoder_reads_the_start_and_what_it_has_predicted(name, sampled):
    task, batch = make(name), sampled(make(name))
    assert np.all(batch.decoder_inputs[:, 0] == task.start_token)
    np.testing.assert_array_equal(batch.decoder_inputs[:, 1:], batch.targets[:, :-1])
    assert not np.any(batch.targets == task.start_token)


@every_task
def test_end_token_is_the_last_target_that_counts(name, sampled):
    task, batch = make(name), sampled(make(name))
    counted = np.arange(task.target_length) < batch.decoder_lengths[:, None]
    np.testing.assert_array_equal(batch.weights, counted)
    last = batch.targets[np.arange(len(counted)), batch.decoder_lengths - 1]
    assert np.all(last == task.end_token)
    assert np.all((batch.targets == task.end_token).sum(1) == 1 + (~counted).sum(1))


@every_task
def test_batch_is_the_same_however_its_indices_are_spread(name, sampled):
    whole = sampled(make(name))
    part = sampled(make(name), indices=np.arange(4096, dtype=np.int32)[::-1])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[::-1], whole), part)


@every_task
def test_every_position_and_class_has_a_text(name, sampled):
    task, example = make(name), first(sampled(make(name)))
    for labels, length, valid in (
        (task.labels(example), task.sequence_length, example.lengths),
        (task.decoder_labels(example), task.target_length, example.decoder_lengths),
    ):
        assert len(labels) == length
        assert [label == "<pad>" for label in labels] == list(
            np.arange(length) >= valid
        )
    assert task.decoder_labels(example)[0] == "<start>"
    assert task.class_label(task.end_token) == "<end>"
    assert len({task.class_label(c) for c in range(task.num_classes)}) == (
        task.num_classes
    )


@every_task
def test_a_question_is_encoded_as_its_source(name, sampled):
    task, batch = make(name), sampled(make(name))
    for i in range(5):
        example = first(batch, i)
        tokens = task.encode(task.question(example))
        np.testing.assert_array_equal(tokens, example.inputs[: example.lengths])


@every_task
def test_axes_that_devices_split_are_those_of_batch_and_positions(name, sampled):
    axes = sampled(make(name)).axes()
    assert axes == tasks.Example("BT", "BT", "BT", "B", "BT", "B")


@every_task
def test_encoded_source_is_that_of_the_example_and_no_longer(name, sampled):
    task, example = make(name), first(sampled(make(name)))
    separator = " " if name.endswith("seq2seq") else ""
    text = separator.join(task.labels(example)[: example.lengths])
    np.testing.assert_array_equal(task.encode(text), example.inputs[: example.lengths])
    long = separator.join([text] * (1 + task.sequence_length))
    with pytest.raises(checks.ConfigError, match="text must have at most"):
        task.encode(long)


def test_share_that_is_held_out_is_as_asked_and_stays():
    names = [str(number) for number in range(4000)]
    few = {each for each in names if sampling.is_held_out(each, 0.1)}
    more = {each for each in names if sampling.is_held_out(each, 0.3)}
    assert few < more
    np.testing.assert_allclose([len(few), len(more)], [400, 1200], rtol=0.1)


def test_source_of_no_tokens_and_what_is_behind_a_length_are_padding():
    task = make("reverse_seq2seq")
    source, target = jnp.full(5, 3), jnp.full(6, 2)
    example = task.pair(source, jnp.int32(0), target, jnp.int32(1))
    assert example.inputs.tolist() == [0] * 5 and example.lengths == 0
    assert example.targets.tolist() == [2] + [task.end_token] * 5
    assert example.weights.tolist() == [1, 1, 0, 0, 0, 0]
