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
from tests.training.tasks import test_base
from tests.training.tasks.examples import sampled

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
def test_example_has_the_declared_shapes_types_and_ranges(name):
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
def test_decoder_reads_the_start_and_what_it_has_predicted(name):
    task, batch = make(name), sampled(make(name))
    assert np.all(batch.decoder_inputs[:, 0] == task.start_token)
    np.testing.assert_array_equal(batch.decoder_inputs[:, 1:], batch.targets[:, :-1])
    assert not np.any(batch.targets == task.start_token)


@every_task
def test_end_token_is_the_last_target_that_counts(name):
    task, batch = make(name), sampled(make(name))
    counted = np.arange(task.target_length) < batch.decoder_lengths[:, None]
    np.testing.assert_array_equal(batch.weights, counted)
    last = batch.targets[np.arange(len(counted)), batch.decoder_lengths - 1]
    assert np.all(last == task.end_token)
    assert np.all((batch.targets == task.end_token).sum(1) == 1 + (~counted).sum(1))


@every_task
def test_every_position_and_class_has_a_text(name):
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
def test_a_question_is_encoded_as_its_source(name):
    task, batch = make(name), sampled(make(name))
    for i in range(5):
        example = first(batch, i)
        tokens = task.encode(task.question(example))
        np.testing.assert_array_equal(tokens, example.inputs[: example.lengths])


@every_task
def test_axes_that_devices_split_are_those_of_batch_and_positions(name):
    axes = sampled(make(name)).axes()
    assert axes == tasks.Example("BT", "BT", "BT", "B", "BT", "B")


def test_a_source_that_is_too_long_is_refused():
    with pytest.raises(checks.ConfigError, match="text must have at most 5 tokens"):
        make("reverse_seq2seq").encode("1 " * 6)


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


def test_a_reversed_source_is_the_target_and_aligned_with_it():
    task, batch = make("reverse_seq2seq"), sampled(make("reverse_seq2seq"))
    for i in range(256):
        example = first(batch, i)
        length = example.lengths
        assert (
            example.targets[:length].tolist() == example.inputs[:length][::-1].tolist()
        )
        rows, columns = np.nonzero(task.alignments(example)["aligned"])
        assert rows.tolist() == list(range(length))
        np.testing.assert_array_equal(example.inputs[columns], example.targets[rows])
    shares = np.bincount(batch.lengths, minlength=6) / len(batch.lengths)
    np.testing.assert_allclose(shares, [0, 0, *[1 / 4] * 4], atol=0.03)


def test_the_worked_example_is_reversed():
    task = tasks.make("reverse_seq2seq", min_length=2, max_length=6)
    lines = [line.split() for line in type(task).__doc__.splitlines()]
    row = {line[0]: line[1:] for line in lines if line}
    source = task.encode(" ".join(row["inputs"]))
    padded = np.pad(source, (0, 6 - len(source))), len(source)
    target = np.pad(source[::-1], (0, 7 - len(source))), len(source)
    example = task.pair(*padded, *target)
    assert [task.class_label(c) for c in example.targets.tolist()] == row["targets"]
    assert example.weights.tolist() == list(map(float, row["weights"]))
    assert task.answer(example.targets) == " ".join(map(str, source[::-1]))


@pytest.mark.parametrize("sizes", [(2, 5, 7), (3, 3, 2)])
def test_baseline_is_the_best_that_no_look_at_the_input_can_do(sizes):
    names = ("min_length", "max_length", "num_tokens")
    task = tasks.make("reverse_seq2seq", **dict(zip(names, sizes, strict=True)))
    test_base.check_baseline(task, [sampled(task, seed=seed) for seed in range(4)])
