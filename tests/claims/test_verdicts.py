"""Intervals over seeds, and the verdicts that they lead to."""

import math

import numpy as np
import pytest

from experiments.claims import base, verdicts

ABOVE = base.Criterion("above", "a", at_least=1.0)
BELOW = base.Criterion("below", lambda x: 2 * x["b"], at_most=1.0)


def test_the_interval_is_students():
    # By hand: mean 2, standard deviation 1, t of 2 degrees of freedom at 95 % 2.919986.
    found = verdicts.interval([1.0, 2.0, 3.0])
    half = 2.919986 / math.sqrt(3)
    np.testing.assert_allclose(found, (2.0, 2.0 - half, 2.0 + half), rtol=1e-6)


@pytest.mark.parametrize("values", [[3.0], [1.0, math.nan, 2.0]])
def test_one_number_or_one_that_is_not_finite_says_nothing(values):
    found = verdicts.interval(values)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_equal_numbers_leave_a_point():
    assert verdicts.interval([0.5] * 4) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "words", "word"),
    [
        ((1.1, 1.2, 1.3), (0.3, 0.3, 0.3), "holds holds", "reproduced"),
        ((1.0, 1.0, 1.0), (0.5, 0.5, 0.5), "holds holds", "reproduced"),  # on the bound
        # The mean is not enough.
        ((0.9, 1.3, 1.7), (0.3, 0.3, 0.3), "undecided holds", "inconclusive"),
        ((1.1, 1.2, 1.3), (0.4, 0.5, 0.7), "holds undecided", "inconclusive"),
        ((0.9, 1.3, 1.7), (0.4, 0.5, 0.7), "undecided undecided", "inconclusive"),
        ((0.5, 0.6, 0.7), (0.6, 0.7, 0.8), "fails fails", "not reproduced"),
        ((1.1, 1.2, 1.3), (0.6, 0.7, 0.8), "holds fails", "partly"),
        ((math.nan, 2.0, 2.0), (0.6, 0.6, 0.6), "undecided fails", "inconclusive"),
        ((1.1, 1.2), (0.3, 0.3), "undecided holds", "inconclusive"),
    ],
)
def test_a_criterion_holds_where_the_whole_interval_is_on_its_side(a, b, words, word):
    numbers = {7 + i: dict(a=x, b=y) for i, (x, y) in enumerate(zip(a, b, strict=True))}
    found = verdicts.judge([ABOVE, BELOW], numbers)
    assert found.word == word
    assert [each.word for each in found.judged] == words.split()
    assert found.seeds == tuple(numbers)
    np.testing.assert_array_equal(found.judged[1].values, 2 * np.array(b))


def test_what_holds_in_the_control_too_is_void():
    same = {seed: {"a": 2.0, "b": 0.1} for seed in range(3)}
    other = {seed: {"a": 2.0, "b": 0.9} for seed in range(3)}
    control = verdicts.judge([ABOVE, BELOW], other)
    found = verdicts.judge([ABOVE, BELOW], same, control)
    assert [each.word for each in found.judged] == ["void", "holds"]
    assert found.word == "partly"
    assert verdicts.judge([ABOVE], same, control).word == "not reproduced"


def test_what_is_undecided_counts_where_it_cannot_change_the_verdict():
    third = base.Criterion("third", "c", at_least=0.0)
    numbers = {x: {"a": 2.0 + 0.1 * x, "b": 0.9, "c": x - 1.0} for x in range(3)}
    found = verdicts.judge([ABOVE, BELOW, third], numbers)
    assert [each.word for each in found.judged] == ["holds", "fails", "undecided"]
    assert (found.word, found.holding) == ("partly", 1)


def test_three_seeds_are_enough_where_their_interval_leaves_out_the_bound():
    # By hand: the half-width of three seeds is 2.919986 / sqrt(3) = 1.685855 standard
    # deviations, here 0.1 and 0.2.
    near = {x: {"a": 1.17 + 0.1 * (x - 1)} for x in range(3)}
    wide = {x: {"a": 1.17 + 0.2 * (x - 1)} for x in range(3)}
    assert verdicts.seeds_needed([ABOVE], near) == 3
    assert verdicts.seeds_needed([ABOVE], wide) == 6
    below = {x: {"a": 0.83 + 0.1 * (x - 1)} for x in range(3)}  # it decides a failure
    assert verdicts.seeds_needed([ABOVE], below) == 3


@pytest.mark.parametrize(
    ("spread", "is_close"),
    # By hand: the half-width is 1.685855 times the spread, and the end of the interval
    # must be as far from the bound, which is 0.4 below the mean.
    [(0.118, False), (0.119, True), (0.3, True), (0.0, False)],
)
@pytest.mark.parametrize("side", [1, -1])
def test_an_interval_within_half_its_width_of_the_bound_is_close(
    spread, is_close, side
):
    numbers = {x: {"a": 1.0 + side * 0.4 + spread * (x - 1)} for x in range(3)}
    (judged,) = verdicts.judge([ABOVE], numbers).judged
    assert verdicts.is_close(judged) == is_close


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ("partly", "partly", "partly"),
        ("reproduced", "partly", "inconclusive"),
        ("reproduced", None, "reproduced"),
    ],
)
def test_a_verdict_stands_where_a_second_set_of_seeds_agrees(first, second, word):
    assert verdicts.both(first, second) == word
