"""Tests of runs share one cache of compiled programs: most compile the same three."""

import shutil

import pytest

from tests.runs import faults


@pytest.fixture(scope="session", autouse=True)
def _programs_are_cached(compilation_cache):
    yield


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """The folder of an uninterrupted run, trained once."""
    return tmp_path_factory.mktemp("runs") / "whole"


@pytest.fixture
def whole(whole_run, make_config):
    """The same, and the state it ended with."""
    if not whole_run.exists():
        faults.train(make_config(), whole_run)
    return whole_run, faults.state(whole_run, make_config())


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of its folder, to do harm to."""
    return shutil.copytree(whole[0], tmp_path / "copy")
