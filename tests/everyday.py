"""Which cases of a costly property are tested every day; the others are slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """Returns cases for `parametrize`, slow except `count` that spread over them."""
    cases = list(cases)
    kept = {i * len(cases) // count for i in range(count)}
    return [case if i in kept else _slow(case) for i, case in enumerate(cases)]


def those(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns cases for `parametrize`, slow except the ones in `kept`."""
    cases = list(cases)
    assert all(each in cases for each in kept), f"{kept} are not all in {cases}"
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(
            *case.values, id=case.id, marks=(*case.marks, pytest.mark.slow)
        )
    values = case if isinstance(case, tuple | list) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
