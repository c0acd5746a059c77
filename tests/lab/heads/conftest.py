"""A small model to measure, with its data."""

import pytest

from mha_haiku import heads
from tests.lab.heads.small_models import build, config, example, loss, random_params


@pytest.fixture
def subject():
    """A model, a loss, random parameters and two batches, the second with padding."""
    of = config()
    batches = [example(0), example(1)]
    return heads.Measured(build(of), loss, random_params(of), batches)
