"""Tasks by their rules, in samples and in the examples of docstrings; their limits."""

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from mha_haiku import tasks
from tests.training.tasks.examples import sampled, worked_example


def _function(rule):
    def check(task, inputs, targets, weights):
        assert targets == rule(inputs) and weights == [1] * len(inputs)

    return check


def _counts(tokens):
    return [Counter(tokens)[token] for token in tokens]


def _parity(task, inputs, targets, weights):
    start = task.has_start
    assert inputs[:start] == [2] * start and targets[:start] == [0] * start
    assert targets[start:] == (np.cumsum(inputs[start:]) % 2).tolist()
    assert weights == [0] * start + [1] * (len(inputs) - start)


def _recall(task, inputs, targets, weights):
    asked = 2 * task.num_pairs
    table = dict(zip(inputs[0:asked:2], inputs[1:asked:2], strict=True))
    assert len(table) == task.num_pairs and max(table) < task.num_keys
    assert targets[asked:] == [table[x] - task.num_keys for x in inputs[asked:]]
    assert weights == [0] * asked + [1] * (len(inputs) - asked)


def _induction(task, inputs, targets, weights):
    """Targets count where an induction head predicts, which is always right there."""
    half = len(inputs) // 2
    first, second = inputs[:half], inputs[half:]
    place = first.index(second[0])
    assert len(set(first)) == half and second == first[place:] + first[:place]
    assert targets[:-1] == inputs[1:]
    last = len(inputs) - 1
    counts = [half <= t < last and x != first[-1] for t, x in enumerate(inputs)]
    assert weights == counts


def _sum(task, inputs, targets, weights):
    a, plus, b, equals = inputs
    assert (plus, equals) == (task.modulus, task.modulus + 1)
    assert targets[3] == (a + b) % task.modulus and weights == [0, 0, 0, 1]


def _backcopy(task, inputs, targets, weights):
    few = task.num_triggers
    assert inputs == [task.num_symbols, *targets[:-1]] and targets[0] >= few
    assert weights == [0] + [1] * (len(inputs) - 1)
    for before, token, after in zip(inputs, inputs[1:], targets[1:], strict=False):
        assert token >= few or after == before >= few


UNIFORM = {"sequence_length": 5, "num_tokens": 7}
CASES = {  # options, the options of the docstring's example, and the rule
    "reverse": (UNIFORM, {"num_tokens": 10}, _function(lambda x: x[::-1])),
    "copy": (UNIFORM, {"num_tokens": 10}, _function(list)),
    "sort": (UNIFORM, {"num_tokens": 10}, _function(sorted)),
    "histogram": (UNIFORM, {"num_tokens": 10}, _function(_counts)),
    "parity": ({"sequence_length": 5}, {"sequence_length": 6}, _parity),
    "associative_recall": (
        {"sequence_length": 11, "num_pairs": 3, "num_keys": 7, "num_values": 4},
        {"sequence_length": 8, "num_keys": 8, "num_values": 8},
        _recall,
    ),
    "induction": (
        {"sequence_length": 12, "num_tokens": 9},
        {"sequence_length": 10, "num_tokens": 10},
        _induction,
    ),
    "modular_addition": ({"modulus": 7, "train_fraction": 0.6}, {}, _sum),
    "bigram_backcopy": (
        {"sequence_length": 11, "num_symbols": 6, "num_triggers": 2},
        {"sequence_length": 8, "num_symbols": 8},
        _backcopy,
    ),
}
every_task = pytest.mark.parametrize("name", CASES)


@functools.cache
def make(name, **changes):
    return tasks.make(name, **CASES[name][0] | changes)


def check(task, batch):
    for row in zip(*(x[:256].tolist() for x in batch[:3]), strict=True):
        CASES[task.name][2](task, *row)


@every_task
def test_examples_obey_the_rule(name):
    check(make(name), sampled(make(name)))


@every_task
def test_the_worked_example_obeys_the_rule(name):
    task = make(name, **CASES[name][1])
    CASES[name][2](task, *(x.tolist() for x in worked_example(task)))


def test_a_start_token_counts_for_nothing():
    task = make("parity", has_start=True)
    batch = sampled(task)
    check(task, batch)
    np.testing.assert_allclose(batch.inputs[:, 1:].mean(0), 0.5, atol=0.03)


def test_long_sequences_are_drawn_by_sorting():
    sizes = {"num_pairs": 2048, "num_keys": 4096, "num_values": 4096}
    task = make("associative_recall", sequence_length=8192, **sizes)
    check(task, sampled(task, indices=np.arange(2)))


def test_no_distance_leads_to_the_answer():
    inputs = sampled(make("induction")).inputs
    distances = 6 - np.argmax(inputs[:, :6] == inputs[:, [6]], axis=1)
    shares = np.bincount(distances, minlength=7)[1:] / len(distances)
    np.testing.assert_allclose(shares, np.full(6, 1 / 6), atol=0.03)


@pytest.mark.parametrize("num_triggers", [0, 2])
def test_other_symbols_are_drawn_by_the_table(num_triggers):
    task = make("bigram_backcopy", num_triggers=num_triggers)
    np.testing.assert_allclose(task.table.sum(-1), 1)
    inputs, targets = (x[:, 1:].ravel() for x in sampled(task)[:2])
    for symbol in range(num_triggers, 6):
        after = targets[inputs == symbol]
        shares = np.bincount(after, minlength=6) / len(after)
        np.testing.assert_allclose(shares, task.table[symbol], atol=0.025)


def test_sums_of_both_parts_are_the_table_and_none_is_in_both_either_way_round():
    task = make("modular_addition", modulus=31)
    parts = [set(map(tuple, x.tolist())) for x in (task.train_data, task.held_out_data)]
    train, held_out = parts
    assert len(train) + len(held_out) == 31**2 and not train & held_out
    assert train | held_out == set(itertools.product(range(31), repeat=2))
    assert {pair[::-1] for pair in train} == train
    np.testing.assert_allclose(len(train) / 31**2, 0.6, atol=0.02)
    for data, part in zip((task.train_data, task.held_out_data), parts, strict=True):
        drawn = set(map(tuple, sampled(task, data=data).inputs[:, [0, 2]].tolist()))
        assert drawn <= part and len(drawn) > 0.9 * len(part)


def test_states_follow_chains_that_are_drawn_anew_in_each_example():
    batch = sampled(tasks.make("markov_chains", sequence_length=7, num_tokens=2))
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    # With rows uniform over distributions, a repeated transition is repeated again with
    # probability (n + 1) / (n + 2), Laplace's rule of succession: here n is 1 and 2.
    stays = batch.inputs[:, 1] == batch.inputs[:, 0]
    again = batch.inputs[:, 2] == batch.inputs[:, 1]
    third = batch.inputs[:, 3] == batch.inputs[:, 2]
    assert abs(np.mean(stays) - 1 / 2) < 0.03
    assert abs(np.mean(again[stays]) - 2 / 3) < 0.04
    assert abs(np.mean(third[stays & again]) - 3 / 4) < 0.04


def test_the_target_is_the_class_of_the_largest_priority_among_the_items():
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


@pytest.mark.parametrize(
    ("name", "rule"), [("copy", list), ("sort", sorted), ("histogram", _counts)]
)
def test_the_baseline_is_that_of_all_sequences_counted_by_hand(name, rule):
    length, num_tokens = 5, 3
    sequences = itertools.product(range(num_tokens), repeat=length)
    by_position = zip(*map(rule, sequences), strict=True)
    accuracies, losses = [], []
    for targets in by_position:
        shares = [count / num_tokens**length for count in Counter(targets).values()]
        accuracies.append(max(shares))
        losses.append(-sum(share * math.log(share) for share in shares))
    baseline = make(name, sequence_length=length, num_tokens=num_tokens).baseline
    np.testing.assert_allclose(baseline["accuracy"], np.mean(accuracies), rtol=1e-12)
    np.testing.assert_allclose(baseline["loss"], np.mean(losses), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("reverse", {"sequence_length": 0}, "sequence_length must be an integer from"),
        ("reverse", {"num_tokens": 2.5}, "num_tokens must be an integer from 2"),
        ("parity", {"sequence_length": 1, "has_start": True}, "sequence_length must"),
        ("associative_recall", {"num_pairs": 6}, "num_pairs must be .* from 1 to 5"),
        ("associative_recall", {"num_keys": 2}, "num_keys must be an integer from 3"),
        ("induction", {"sequence_length": 7}, "sequence_length must be even, got 7"),
        ("induction", {"num_tokens": 5}, "num_tokens must be an integer from 6"),
        ("modular_addition", {"modulus": 1}, "modulus must be an integer from 2"),
        ("modular_addition", {"train_fraction": 1.5}, "train_fraction must be a numb"),
        ("modular_addition", {"train_fraction": 0.0}, "leave sums .* 0 to train on"),
        ("modular_addition", {"train_fraction": 0.99}, "leave sums .* 0 held out"),
        ("bigram_backcopy", {"num_triggers": 6}, "num_triggers must be an integer"),
        ("max_retrieval", {"min_items": 6, "max_items": 5}, "min_items"),
        ("reverse_seq2seq", {"max_length": 1}, "min_length must be at most max_length"),
    ],
)
def test_impossible_sizes_are_refused(name, changes, message):
    options = CASES[name][0] if name in CASES else {}
    with pytest.raises(ValueError, match=message):
        tasks.make(name, **options | changes)
