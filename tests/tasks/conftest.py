"""Shared fixtures: batches on the host, and the worked examples of docstrings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import tasks


@pytest.fixture
def sampled():
    """Returns a function of a task: a batch of its examples as NumPy arrays."""

    def sample(task, size=64, seed=0, data=None):
        data = task.train_data if data is None else data
        draw = jax.jit(lambda key, d: tasks.batch(task, key, d, jnp.arange(size)))
        return jax.tree.map(np.asarray, draw(jax.random.key(seed), data))

    return sample


@pytest.fixture
def worked_example():
    """Returns a function of a task: inputs, targets and weights of its docstring."""

    def read(task):
        row = re.compile(r"^ +(inputs|targets|weights) +(\S.*)$", re.MULTILINE)
        rows = dict(row.findall(type(task).__doc__))
        classes = {task.class_label(c): c for c in range(task.num_classes)}
        classes |= {str(c): c for c in range(task.num_classes)} | {".": 0}
        targets = [classes[word] for word in rows["targets"].split()]
        weights = [float(word) for word in rows["weights"].split()]
        return task.encode(rows["inputs"]), np.array(targets), np.array(weights)

    return read
