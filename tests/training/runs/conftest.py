"""Tests of runs share one cache of compiled programs: most compile the same three."""

import shutil

import pytest

from tests.training.runs import faults


@pytest.fixture(scope="session", autouse=True)
def _programs_are_cached(compilation_cache):
    yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory, make_config, compilation_cache):
    """The folder of an uninterrupted run, and the state it ended with."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    faults.train(make_config(), folder)
    return folder, faults.state(folder, make_config())


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of its folder, to do harm to."""
    return shutil.copytree(whole[0], tmp_path / "copy")
