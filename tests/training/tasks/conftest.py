"""Examples of tasks."""

import pytest

from tests.training.tasks import examples


@pytest.fixture
def sampled():
    return examples.sampled


@pytest.fixture
def worked_example():
    return examples.worked_example
