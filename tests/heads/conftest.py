"""Small models of every kind of heads, with random parameters, and data for them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import heads, models, tasks
from tests.tiny_runs import model_config

B, T, C, D, H, K, F, L = 3, 5, 7, 10, 4, 6, 11, 3
NUM_TOKENS = 13


def config(**fields):
    """Returns the config of a model of causal attention, with fields replaced."""
    own = {
        "family": "causal",
        "num_layers": L,
        "model_size": D,
        "dropout_rate": 0.1,
        "embedding__max_length": 8,
        "attention__num_heads": H,
        "attention__key_size": K,
        "attention__implementation": "dense",
        "feed_forward__hidden_size": F,
    }
    return model_config(**{**own, **fields})


def build(of):
    return models.build(of, num_tokens=NUM_TOKENS, feature_size=None, num_classes=C)


def random_params(of, seed=0):
    """Returns random parameters for a config, biases and scales too."""
    generator = np.random.default_rng(seed)
    tokens = np.zeros((B, T), np.int32)
    shapes = jax.eval_shape(build(of).init, jax.random.key(0), tokens)
    return jax.tree.map(
        lambda leaf: np.float32(
            generator.standard_normal(leaf.shape) / math.sqrt(leaf.shape[0])
        ),
        shapes,
    )


def example(seed=0, count=B, lengths=None):
    """Returns a batch of random tokens and targets; not all targets count."""
    generator = np.random.default_rng(seed)
    return tasks.Example(
        generator.integers(0, NUM_TOKENS, (count, T)).astype(np.int32),
        generator.integers(0, C, (count, T)).astype(np.int32),
        (generator.uniform(size=(count, T)) < 0.8).astype(np.float32),
        lengths,
    )


def loss(logits, batch):
    """Returns the weighted cross-entropy of each example, `[B]`."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch.targets[..., None], -1
    )
    return -(chosen[..., 0] * batch.weights).sum(-1)


@pytest.fixture
def subject():
    """A model, a loss, random parameters and two batches, the second with padding."""
    of = config()
    batches = [example(0), example(1)]
    return heads.Subject(build(of), loss, random_params(of), batches)
