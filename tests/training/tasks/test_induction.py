import numpy as np
import pytest

from mha_haiku.training.tasks import uniform_tasks


def make(**changes):
    options = {"sequence_length": 12, "num_tokens": 9}
    return uniform_tasks.Induction(**(options | changes))


def check_rule(inputs, targets, weights):
    """Targets count where an induction head predicts, which is always right there."""
    tokens = inputs.tolist()
    half = len(tokens) // 2
    first, second = tokens[:half], tokens[half:]
    assert len(set(first)) == half
    place = first.index(second[0])
    assert second == first[place:] + first[:place]
    for t in range(len(tokens)):
        follower = tokens[tokens.index(tokens[t]) + 1] if t >= half else None
        known = half <= t < len(tokens) - 1 and follower == tokens[t + 1]
        assert weights[t] == float(known)
        if t < len(tokens) - 1:
            assert targets[t] == tokens[t + 1]


def test_second_half_repeats_the_first_from_some_place(sampled):
    batch = sampled(make())
    for inputs, targets, weights in list(zip(*batch[:3], strict=True))[:256]:
        check_rule(inputs, targets, weights)


def test_worked_example_obeys_the_rule(worked_example):
    check_rule(*worked_example(make(sequence_length=10, num_tokens=10)))


def test_no_distance_leads_to_the_answer(sampled):
    inputs = sampled(make()).inputs
    distances = 6 - np.argmax(inputs[:, :6] == inputs[:, [6]], axis=1)
    frequencies = np.bincount(distances, minlength=7)[1:] / len(distances)
    np.testing.assert_allclose(frequencies, np.full(6, 1 / 6), atol=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 2}, "^sequence_length must be an integer from 4"),
        ({"sequence_length": 7}, "^sequence_length must be even, got 7"),
        ({"num_tokens": 5}, "^num_tokens must be an integer from 6"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
