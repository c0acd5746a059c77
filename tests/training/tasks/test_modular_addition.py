import itertools

import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tasks


def make(modulus=7, train_fraction=0.6):
    return uniform_tasks.ModularAddition(modulus=modulus, train_fraction=train_fraction)


def test_inputs_are_a_sum_and_the_target_its_remainder(sampled):
    batch = sampled(make())
    a, plus, b, equals = batch.inputs.T
    assert set(plus) == {7} and set(equals) == {8}
    np.testing.assert_array_equal(batch.targets[:, 3], (a + b) % 7)
    np.testing.assert_array_equal(batch.weights, [[0, 0, 0, 1]] * 4096)


def test_worked_example_obeys_the_rule(worked_example):
    inputs, targets, weights = worked_example(make())
    assert targets[3] == (inputs[0] + inputs[2]) % 7
    assert weights.tolist() == [0, 0, 0, 1]


def test_parts_share_no_sum_even_the_other_way_round_and_are_the_whole_table():
    task = make(modulus=11)
    train = {tuple(pair) for pair in task.train_data.tolist()}
    held_out = {tuple(pair) for pair in task.held_out_data.tolist()}
    assert len(train) == len(task.train_data)
    assert len(held_out) == len(task.held_out_data)
    assert train | held_out == set(itertools.product(range(11), repeat=2))
    assert not train & held_out
    assert {pair[::-1] for pair in train} == train


def test_split_is_the_same_each_time_and_as_large_as_asked_for():
    first, second = make(modulus=31), make(modulus=31)
    np.testing.assert_array_equal(first.train_data, second.train_data)
    np.testing.assert_allclose(len(first.train_data) / 31**2, 0.6, atol=0.02)


def test_examples_come_from_the_data_they_are_given(sampled):
    task = make()
    for data in (task.train_data, task.held_out_data):
        a, _, b, _ = sampled(task, data=data).inputs.T
        drawn = set(zip(a.tolist(), b.tolist(), strict=True))
        assert drawn <= {tuple(pair) for pair in data.tolist()}
        assert len(drawn) > 0.9 * len(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modulus": 1}, "^modulus must be an integer from 2"),
        ({"train_fraction": 1.5}, "^train_fraction must be a number"),
        ({"train_fraction": float("nan")}, "^train_fraction must be a number"),
        (
            {"train_fraction": 0.0},
            "^train_fraction must leave sums .* 0 to train on",
        ),
        (
            {"train_fraction": 0.99},
            "^train_fraction must leave sums .* 0 held out",
        ),
    ],
)
def test_impossible_tables_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
