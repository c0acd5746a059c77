"""Each program is what it says, and its model computes it."""

import numpy as np
import pytest

from mha_haiku import rasp
from tests import oracles


def _each(function):
    """From a function of the tokens and a position, called at each position."""
    return lambda x: [function(x, i) for i in range(len(x))]


def _only(x, i):
    return x[i] if 0 <= i < len(x) else None


def _last(keys, x, at):
    """The value at a distance from the last of the keys."""
    return x[max(keys) + at] if keys else None


def _again(x, i, size):
    """Where the last tokens that are like the `size` ones up to i end, before i."""
    own = x[i - size + 1 : i + 1]
    return [
        j
        for j in range(size - 1, i)
        if i >= size - 1 and x[j - size + 1 : j + 1] == own
    ]


def _hops(x, i, number):
    for _ in range(number):
        i = x[i]
    return x[i]


# What each program computes, once more.
ORACLES = {
    "previous_token": _each(lambda x, i: _only(x, i - 1)),
    "reverse": lambda x: x[::-1],
    "largest": lambda x: [max(x)] * len(x),
    "histogram": lambda x: [x.count(y) for y in x],
    "induction": _each(lambda x, i: _last(_again(x, i, 1), x, 1)),
    "preceding_again": _each(
        lambda x, i: _only(x, max(_again(x, i, 1)) - 1) if _again(x, i, 1) else None
    ),
    "second_previous": _each(lambda x, i: _only(x, i - 2)),
    "two_hops": _each(lambda x, i: _hops(x, i, 2)),
    "three_hops": _each(lambda x, i: _hops(x, i, 3)),
    "shift_by_name": _each(lambda x, i: _only(x, i - "abcdef".index(x[0]))),
    "sort_different": sorted,
    "is_ascending": _each(lambda x, i: x[: i + 1] == sorted(x[: i + 1])),
    "as_frequent": lambda x: [sum(x.count(z) == x.count(y) for z in x) for y in x],
    "two_token_induction": _each(lambda x, i: _last(_again(x, i, 2), x, 1)),
    "without_duplicates": lambda x: (
        [*dict.fromkeys(x)] + [None] * (len(x) - len(set(x)))
    ),
    "by_frequency": lambda x: sorted(x, key=lambda y: -x.count(y)),
}


def _inputs(program, count, seed):
    places = program.sample(np.random.default_rng(seed), count)
    return [[program.vocabulary[i] for i in row] for row in places.tolist()]


@pytest.mark.parametrize("name", rasp.PROGRAMS)
def test_interpreter_and_model_compute_the_program(name):
    program = rasp.PROGRAMS[name](length=6)
    for inputs in _inputs(program, 20, seed=1):
        assert program(inputs) == ORACLES[name](inputs)
    for seed in (0, 1):
        compiled = rasp.compile(program, num_heads=3, seed=seed)
        example = compiled.examples(9, seed=seed)
        logits = oracles.transformer(compiled.params, example.inputs, compiled.config)
        np.testing.assert_array_equal(logits.argmax(-1), example.targets)
        answer = np.take_along_axis(logits, example.targets[..., None], -1)
        others = np.sort(logits, axis=-1)[..., -2:-1]
        assert (answer - others)[:, 1:].min() > 5
    # Not trivially so: answers differ within and between the inputs.
    assert len(np.unique(compiled.examples(30).targets[:, 1:])) > 1
