"""Tests of runs share one cache of compiled programs: most compile the same three."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _programs_are_cached(compilation_cache):
    yield
