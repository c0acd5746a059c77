"""Chains that are drawn anew in each example."""

import numpy as np

from mha_haiku import tasks


def test_targets_are_the_next_inputs_and_follow_uniform_chains(sampled):
    task = tasks.make("markov_chains", sequence_length=7, num_tokens=2)
    batch = sampled(task)
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    # With rows uniform over distributions, a repeated transition is repeated again with
    # probability (n + 1) / (n + 2), Laplace's rule of succession: here n is 1 and 2.
    stays = batch.inputs[:, 1] == batch.inputs[:, 0]
    again = batch.inputs[:, 2] == batch.inputs[:, 1]
    third = batch.inputs[:, 3] == batch.inputs[:, 2]
    assert abs(np.mean(stays) - 1 / 2) < 0.03
    assert abs(np.mean(again[stays]) - 2 / 3) < 0.04
    assert abs(np.mean(third[stays & again]) - 3 / 4) < 0.04
