"""Edit distance of a model's answer from a right one."""

from collections.abc import Sequence

import numpy as np


def distance(answer: Sequence[int], right: Sequence[int]) -> int:
    """Counts the fewest tokens to insert, delete and replace to reach `right`.

    Source: Levenshtein 1966; Wagner and Fischer 1974, doi:10.1145/321796.321811.
    """
    # row[j]: the distance of the tokens of `answer` so far to the first j of `right`.
    row = list(range(len(right) + 1))
    for i, token in enumerate(answer):
        diagonal, row[0] = row[0], i + 1
        for j, wanted in enumerate(right):
            replaced = diagonal + (token != wanted)
            diagonal = row[j + 1]
            row[j + 1] = min(replaced, diagonal + 1, row[j] + 1)
    return row[-1]


def nearest(
    answer: Sequence[int], right_answers: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Finds the distance to the nearest right answer, and that answer's length."""
    if answer in right_answers:
        return 0, len(answer)
    return min((distance(answer, right), len(right)) for right in right_answers)


def error_rate(edits: np.ndarray, lengths: np.ndarray) -> float:
    """Returns edits per token of right answers; nan where these have no token."""
    total = int(np.sum(lengths))
    return float(np.sum(edits)) / total if total else float("nan")
