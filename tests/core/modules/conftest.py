"""Random arrays and parameters for modules."""

import functools
import math

import jax
import numpy as np
import pytest


@pytest.fixture
def normal():
    """A function from a shape to float32 normal numbers, others at each call."""
    generator = np.random.default_rng(0)
    return lambda *shape: generator.standard_normal(shape).astype(np.float32)


@pytest.fixture
def random_parameters(normal):
    """A function that makes random parameters, biases and scales too, of a module.

    It takes a transformed function and its arguments, and leaves the module's own
    initializers unused: what they give may hide a mistake (a bias of 0, a scale of 1).
    """

    def make(transformed, *args, **kwargs):
        init = functools.partial(transformed.init, **kwargs)
        shapes = jax.eval_shape(init, jax.random.key(0), *args)
        return jax.tree.map(
            lambda leaf: normal(*leaf.shape) / np.float32(math.sqrt(leaf.shape[0])),
            shapes,
        )

    return make
