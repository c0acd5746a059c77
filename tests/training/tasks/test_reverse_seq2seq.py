import jax
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.tasks import sequence_to_sequence
from tests.training.tasks import test_base


def make(**options):
    given = {"min_length": 2, "max_length": 5, "num_tokens": 7} | options
    return sequence_to_sequence.ReverseSeq2Seq(**given)


def test_target_is_the_source_in_reverse_order(sampled):
    batch = sampled(make())
    for source, target, n in list(
        zip(batch.inputs.tolist(), batch.targets.tolist(), batch.lengths, strict=True)
    )[:256]:
        assert target[:n] == source[:n][::-1]


def test_lengths_and_tokens_are_uniform(sampled):
    batch = sampled(make())
    shares = np.bincount(batch.lengths, minlength=6) / len(batch.lengths)
    np.testing.assert_allclose(shares, [0, 0, *[1 / 4] * 4], atol=0.03)
    valid = batch.inputs[np.arange(5) < batch.lengths[:, None]]
    np.testing.assert_allclose(np.bincount(valid) / valid.size, [1 / 7] * 7, atol=0.015)


@pytest.mark.parametrize("sizes", [(2, 5, 7), (3, 3, 2)])
def test_baseline_is_the_best_that_no_look_at_the_input_can_do(sizes, sampled):
    names = ("min_length", "max_length", "num_tokens")
    task = make(**dict(zip(names, sizes, strict=True)))
    test_base.check_baseline(task, [sampled(task, seed=seed) for seed in range(4)])


def test_worked_example_obeys_the_rule():
    task = make(max_length=6, num_tokens=10)
    lines = [line.split() for line in type(task).__doc__.splitlines()]
    row = {line[0]: line[1:] for line in lines if line}
    source = task.encode(" ".join(row["inputs"])).tolist()
    padding = [0] * (6 - len(source))
    target = [*source[::-1], *padding, 0]
    example = task.pair(
        np.array(source + padding), len(source), np.array(target), len(source)
    )
    assert [task.class_label(c) for c in example.targets.tolist()] == row["targets"]
    assert example.weights.tolist() == list(map(float, row["weights"]))
    assert task.answer(example.targets) == " ".join(map(str, source[::-1]))


def test_aligned_source_token_is_the_target(sampled):
    task, batch = make(), sampled(make())
    for i in range(20):
        example = jax.tree.map(lambda x, i=i: x[i], batch)
        rows, columns = np.nonzero(task.alignments(example)["aligned"])
        assert rows.tolist() == list(range(example.lengths))
        np.testing.assert_array_equal(example.inputs[columns], example.targets[rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 0}, "min_length must be an integer from 1"),
        ({"max_length": 1}, "min_length must be at most max_length 1, got 2"),
        ({"num_tokens": 1}, "num_tokens must be an integer from 2"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    given = {"min_length": 2} | options
    with pytest.raises(checks.ConfigError, match=message):
        tasks.make("reverse_seq2seq", **given)
