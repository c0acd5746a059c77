"""A tree such as a training state, and a folder of good checkpoints of it."""

import jax
import numpy as np
import optax
import pytest

from mha_haiku.training.runs import checkpoints


def _tree(seed=0):
    generator = np.random.default_rng(seed)
    params = {"w": generator.normal(size=(2, 3)).astype(np.float32), "b": np.zeros(3)}
    params["b"] = params["b"].astype(np.float32)
    state = jax.tree.map(np.asarray, optax.adamw(1e-3).init(params))
    return {"step": np.int32(seed), "params": params, "state": state}


@pytest.fixture
def make_tree():
    """A function of a seed, which is also the tree's step."""
    return _tree


@pytest.fixture(scope="session")
def good_checkpoints(tmp_path_factory):
    """A folder with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    with checkpoints.Checkpoints(folder) as stored:
        for step in (1, 2):
            stored.save(step, _tree(step), held_out_loss=1 / step)
    return folder
