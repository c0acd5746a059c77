"""Tests of runs share one cache of compiled programs: most compile the same three."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import tasks
from mha_haiku.training import train_step
from mha_haiku.training.runs import folders


@pytest.fixture(scope="session", autouse=True)
def _programs_are_cached(compilation_cache):
    yield


@pytest.fixture
def of_task(make_config, monkeypatch):
    """A function that makes `load_run` return an untrained model of a task."""

    def make(task, **fields):
        config = make_config(**fields)
        model = folders.make_model(config.model, task)
        key = train_step.stream(0, "init")
        example = tasks.batch(task, key, (), jnp.arange(1))
        params = jax.jit(model.init)(key, example.inputs, example.lengths)
        # Far from uniform attention.
        params = jax.tree.map(lambda x: 2 * np.asarray(x), params)
        loaded = folders.Run(config, task, model, params, 4)
        monkeypatch.setattr(folders, "load_run", lambda *_, **__: loaded)
        return loaded

    return make
