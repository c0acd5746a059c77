import numpy as np
import pytest

from mha_haiku import tasks


def make(**changes):
    options = {"sequence_length": 11, "num_symbols": 6, "num_triggers": 2}
    return tasks.make("bigram_backcopy", **(options | changes))


def check_rule(inputs, targets, weights, *, num_symbols, num_triggers):
    assert inputs[0] == num_symbols and targets[0] >= num_triggers
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    np.testing.assert_array_equal(weights, np.arange(len(inputs)) > 0)
    for t in range(1, len(inputs)):
        if inputs[t] < num_triggers:
            assert targets[t] == inputs[t - 1] >= num_triggers


def test_after_a_trigger_comes_what_came_before_it(sampled):
    batch = sampled(make())
    for example in list(zip(*batch[:3], strict=True))[:256]:
        check_rule(*example, num_symbols=6, num_triggers=2)


def test_worked_example_obeys_the_rule(worked_example):
    task = make(sequence_length=8, num_symbols=8)
    check_rule(*worked_example(task), num_symbols=8, num_triggers=2)


@pytest.mark.parametrize("num_triggers", [0, 2])
def test_other_symbols_are_drawn_by_the_table(num_triggers, sampled):
    task = make(num_triggers=num_triggers)
    np.testing.assert_allclose(task.table.sum(-1), 1)
    inputs, targets = (x[:, 1:].ravel() for x in sampled(task)[:2])
    for symbol in range(num_triggers, 6):
        after = targets[inputs == symbol]
        shares = np.bincount(after, minlength=6) / len(after)
        np.testing.assert_allclose(shares, task.table[symbol], atol=0.025)


def test_a_chain_needs_a_symbol_that_is_no_trigger():
    with pytest.raises(ValueError, match="num_triggers must be an integer fr"):
        make(num_triggers=6)
