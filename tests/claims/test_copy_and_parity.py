"""The answers of the eight tasks are right."""

import collections

import numpy as np
import pytest

from experiments.claims import copy_and_parity as claim
from experiments.claims import length_extrapolation as models


def _mode(row):
    (most, times), *rest = collections.Counter(row).most_common()
    assert all(count < times for _, count in rest)
    return [most]


def _sum(row):
    first, second = "".join("+" if x == models.PLUS else str(x) for x in row).split("+")
    return [int(x) for x in str(int(first) + int(second)).zfill(len(first) + 1)]


RIGHT = {
    claim.largest: lambda row: [max(row)],
    claim.count: lambda row: list(range(row[0], row[1] + 1)),
    claim.mode: _mode,
    claim.copy_different: list,
    models.sort: sorted,
    claim.copy_repeated: list,
    claim.parity: lambda row: [sum(row) % 2],
    claim.add: _sum,
}


@pytest.mark.parametrize("task", claim.TASKS)
@pytest.mark.parametrize("n", [1, 5, 16])
def test_answers_are_right(task, n):
    inputs, answers = task(np.random.default_rng(n), 7, n)
    for row, answer in zip(inputs.tolist(), answers.tolist(), strict=True):
        assert answer == RIGHT[task](row)
    tokens, _ = models.rows(np.random.default_rng(0), task, np.full(3, n))
    assert tokens.max() < models.VOCABULARY
