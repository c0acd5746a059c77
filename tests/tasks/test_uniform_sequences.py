import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.core import checks
from mha_haiku.training.tasks import uniform_sequences

CLASSES = {
    "copy": uniform_sequences.CopySeq2Seq,
    "reverse": uniform_sequences.ReverseSeq2Seq,
}
each_task = pytest.mark.parametrize("kind", list(CLASSES))


def make(kind, **options):
    return CLASSES[kind](
        **{"min_length": 2, "max_length": 5, "num_tokens": 7} | options
    )


def turned(kind, tokens):
    return tokens if kind == "copy" else tokens[::-1]


@each_task
def test_target_is_the_source_in_its_order(kind, sampled):
    batch = sampled(make(kind))
    for source, target, n in list(
        zip(batch.inputs.tolist(), batch.targets.tolist(), batch.lengths, strict=True)
    )[:256]:
        assert target[:n] == turned(kind, source[:n])


@each_task
def test_lengths_and_tokens_are_uniform(kind, sampled):
    batch = sampled(make(kind))
    shares = np.bincount(batch.lengths, minlength=6) / len(batch.lengths)
    np.testing.assert_allclose(shares, [0, 0, *[1 / 4] * 4], atol=0.03)
    valid = batch.inputs[np.arange(5) < batch.lengths[:, None]]
    np.testing.assert_allclose(np.bincount(valid) / valid.size, [1 / 7] * 7, atol=0.015)


@each_task
@pytest.mark.parametrize("sizes", [(2, 5, 7), (3, 3, 2)])
def test_baseline_is_the_best_that_no_look_at_the_input_can_do(kind, sizes, sampled):
    task = make(
        kind,
        **dict(zip(("min_length", "max_length", "num_tokens"), sizes, strict=False)),
    )
    batches = [sampled(task, seed=seed) for seed in range(4)]
    targets, weights = (
        np.concatenate([getattr(batch, part) for batch in batches])
        for part in ("targets", "weights")
    )
    accuracies, losses = [], []
    for t in range(task.target_length):
        counted = targets[weights[:, t] == 1, t]
        frequencies = np.unique_counts(counted).counts / len(counted)
        accuracies.append(frequencies.max())
        losses.append(-np.sum(frequencies * np.log(frequencies)))
    totals = weights.sum(0)
    np.testing.assert_allclose(
        [task.baseline["accuracy"], task.baseline["loss"]],
        [np.average(each, weights=totals) for each in (accuracies, losses)],
        atol=0.012,
    )


@each_task
def test_worked_example_obeys_the_rule(kind):
    task = make(kind, max_length=6, num_tokens=10)
    lines = [line.split() for line in type(task).__doc__.splitlines()]
    row = {line[0]: line[1:] for line in lines if line}
    source = task.encode(" ".join(row["inputs"])).tolist()
    padding = [0] * (6 - len(source))
    target = [*turned(kind, source), *padding, 0]
    example = task.pair(
        np.array(source + padding), len(source), np.array(target), len(source)
    )
    assert [task.class_label(c) for c in example.targets.tolist()] == row["targets"]
    assert example.weights.tolist() == list(map(float, row["weights"]))
    assert task.answer(example.targets) == " ".join(map(str, turned(kind, source)))


@each_task
def test_aligned_source_token_is_the_target(kind, sampled):
    task, batch = make(kind), sampled(make(kind))
    for i in range(20):
        example = tasks.Example(*(each[i] for each in batch))
        rows, columns = np.nonzero(task.alignments(example)["aligned"])
        assert rows.tolist() == list(range(example.lengths))
        np.testing.assert_array_equal(example.inputs[columns], example.targets[rows])


@each_task
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 0}, "min_length must be an integer from 1"),
        ({"max_length": 1}, "min_length must be at most max_length 1, got 2"),
        ({"num_tokens": 1}, "num_tokens must be an integer from 2"),
    ],
)
def test_impossible_sizes_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **options)
    given = {"min_length": 2} | options
    with pytest.raises(checks.ConfigError, match=message):
        tasks.make(f"{kind}_seq2seq", **given)
