"""Tasks of tokens drawn evenly: the rule, the worked example, the baseline, sizes."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tasks


def occurrences(tokens):
    counts = Counter(tokens)
    return [counts[token] for token in tokens]


RULES = {
    uniform_tasks.Reverse: lambda tokens: tokens[::-1],
    uniform_tasks.Copy: list,
    uniform_tasks.Sort: sorted,
    uniform_tasks.Histogram: occurrences,
}
every_task = pytest.mark.parametrize(
    ("task", "rule"), RULES.items(), ids=[each.name for each in RULES]
)


@every_task
def test_targets_are_by_the_rule_and_all_count(task, rule, sampled):
    batch = sampled(task(sequence_length=5, num_tokens=7))
    for inputs, targets in list(zip(*batch[:2], strict=True))[:256]:
        assert targets.tolist() == rule(inputs.tolist())
    np.testing.assert_array_equal(batch.weights, np.ones((4096, 5)))


def test_tokens_are_uniform(sampled):
    inputs = sampled(uniform_tasks.Reverse(sequence_length=5, num_tokens=7)).inputs
    frequencies = np.bincount(inputs.ravel()) / inputs.size
    np.testing.assert_allclose(frequencies, np.full(7, 1 / 7), atol=0.015)


@every_task
def test_worked_example_obeys_the_rule(task, rule, worked_example):
    example = worked_example(task(sequence_length=5, num_tokens=10))
    inputs, targets, weights = example
    assert targets.tolist() == rule(inputs.tolist())
    assert weights.tolist() == [1.0] * 5


@every_task
def test_baseline_is_that_of_all_sequences_counted_by_hand(task, rule):
    length, num_tokens = 5, 3
    sequences = itertools.product(range(num_tokens), repeat=length)
    by_position = zip(*map(rule, sequences), strict=True)
    accuracies, losses = [], []
    for targets in by_position:
        shares = [count / num_tokens**length for count in Counter(targets).values()]
        accuracies.append(max(shares))
        losses.append(-sum(share * math.log(share) for share in shares))
    baseline = task(sequence_length=length, num_tokens=num_tokens).baseline
    np.testing.assert_allclose(baseline["accuracy"], np.mean(accuracies), rtol=1e-12)
    np.testing.assert_allclose(baseline["loss"], np.mean(losses), rtol=1e-12)


def test_every_count_is_a_class():
    task = uniform_tasks.Histogram(sequence_length=9, num_tokens=4)
    assert task.num_classes == 10
    assert task.class_label(9) == "9"


@every_task
@pytest.mark.parametrize(
    "wrong",
    [
        *({"sequence_length": 0}, {"sequence_length": 2.5}),
        *({"num_tokens": 1}, {"num_tokens": float("nan")}),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(task, rule, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be an integer from"):
        task(**{"sequence_length": 5, "num_tokens": 7} | wrong)
