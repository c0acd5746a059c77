import jax
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.training.tasks import uniform_tasks


def make(**changes):
    options = {"sequence_length": 11, "num_pairs": 3, "num_keys": 7, "num_values": 4}
    return uniform_tasks.AssociativeRecall(**(options | changes))


def check_rule(inputs, targets, weights, *, num_pairs, num_keys):
    keys, values = inputs[0 : 2 * num_pairs : 2], inputs[1 : 2 * num_pairs : 2]
    table = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert len(table) == num_pairs
    assert max(keys) < num_keys <= min(values)
    for position, token in enumerate(inputs.tolist()):
        assert weights[position] == float(position >= 2 * num_pairs)
        if weights[position]:
            assert targets[position] == table[token] - num_keys


def test_each_query_asks_for_the_value_of_its_key(sampled):
    batch = sampled(make())
    for inputs, targets, weights in list(zip(*batch[:3], strict=True))[:256]:
        check_rule(inputs, targets, weights, num_pairs=3, num_keys=7)


def test_worked_example_obeys_the_rule(worked_example):
    task = make(sequence_length=8, num_keys=8, num_values=8)
    check_rule(*worked_example(task), num_pairs=3, num_keys=8)


def test_keys_queries_and_values_are_uniform(sampled):
    inputs = sampled(make()).inputs
    for part, low, count in (
        (inputs[:, [0]], 0, 7),
        (inputs[:, [4]], 0, 7),
        (inputs[:, 6:], 0, 7),
        (inputs[:, [3]], 7, 4),
    ):
        frequencies = np.bincount(part.ravel() - low, minlength=count) / part.size
        np.testing.assert_allclose(frequencies, np.full(count, 1 / count), atol=0.015)


def test_long_sequences_obey_the_rule():
    sizes = {"num_pairs": 2048, "num_keys": 4096, "num_values": 4096}
    task = make(sequence_length=8192, **sizes)
    draw = jax.jit(lambda indices: tasks.batch(task, jax.random.key(0), (), indices))
    batch = jax.tree.map(np.asarray, draw(np.arange(2)))
    for inputs, targets, weights in list(zip(*batch[:3], strict=True))[:256]:
        check_rule(inputs, targets, weights, num_pairs=2048, num_keys=4096)


def test_labels_tell_keys_from_values():
    task = make()
    assert [task.token_label(token) for token in (0, 6, 7, 10)] == [
        "k0",
        "k6",
        "v0",
        "v3",
    ]
    assert task.class_label(3) == "v3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pairs": 6}, "^num_pairs must be an integer from 1 to 5"),
        ({"num_pairs": 0}, "^num_pairs must be an integer from 1 to"),
        ({"num_keys": 2}, "^num_keys must be an integer from 3"),
        ({"num_values": 1}, "^num_values must be an integer from 2"),
        ({"sequence_length": 2}, "^sequence_length must be an integer from 3"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
