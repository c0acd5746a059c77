"""Models of every family with random parameters, and inputs for them.

B examples, T positions of the model or of its decoder, S of a source, D width, H heads,
K their size, F hidden units, C classes.
"""

import math

import jax
import numpy as np

from mha_haiku import models
from tests.tiny_runs import model_config

B, T, S, C, D, H, K, F = 2, 5, 6, 7, 10, 3, 4, 11
NUM_TOKENS, FEATURE_SIZE = 13, 9


def config(**fields):
    """Returns `config.model` of a tiny model, with fields replaced."""
    own = {
        "model_size": D,
        "embedding__max_length": 8,
        "attention__num_heads": H,
        "attention__key_size": K,
        "attention__implementation": "dense",
        "feed_forward__hidden_size": F,
    }
    return model_config(**own | fields)


def build(of, *, features=None, **options):
    """Returns the model of a config: of tokens, except a set classifier."""
    is_set = of.family == "set_classifier"
    features = is_set if features is None else features
    return models.build(
        of,
        num_tokens=None if features else NUM_TOKENS,
        feature_size=FEATURE_SIZE if features else None,
        num_classes=1 if is_set else C,
        **options,
    )


def inputs_of(of, *, seed=0, features=False):
    """Returns what the model of a config takes, some of it padding, by name."""
    generator = np.random.default_rng(seed)
    has_decoder = of.family == "encoder_decoder"
    length = S if has_decoder else T
    if features or of.family == "set_classifier":
        inputs = generator.standard_normal((B, length, FEATURE_SIZE)).astype(np.float32)
    else:
        inputs = generator.integers(0, NUM_TOKENS, (B, length))
    given = {"inputs": inputs, "lengths": np.array([length, 3])}
    if of.embedding.segments:
        size = of.embedding.segments
        given["segments"] = generator.integers(0, size, (B, length))
    if has_decoder:
        given["decoder_inputs"] = generator.integers(0, C, (B, T))
        given["decoder_lengths"] = np.array([3, T])
    return given


def normal(shapes, *, seed=0, scale=1.0):
    """Returns a tree of normal numbers of these shapes."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.float32(scale * generator.standard_normal(x.shape)), shapes
    )


def random_parameters(model, given, *, seed=1):
    """Returns random parameters of a model for inputs, biases and scales too.

    What initializers give may hide a mistake: a bias of 0, a scale of 1.
    """
    generator = np.random.default_rng(seed)
    given = {name: x for name, x in given.items() if name != "segments"}
    shapes = jax.eval_shape(lambda key: model.init(key, **given), jax.random.key(0))
    return jax.tree.map(
        lambda leaf: np.float32(
            generator.standard_normal(leaf.shape) / math.sqrt(leaf.shape[0])
        ),
        shapes,
    )


def oracle_inputs(given):
    """Returns the same inputs by the names that `oracles.transformer` has for them."""
    names = {"inputs": "tokens", "decoder_inputs": "decoder_tokens"}
    return {names.get(name, name): x for name, x in given.items()}


def counted(of, given):
    """Returns which logits are of valid positions, `[B, T]`; `[B]` of pooled ones."""
    if of.output.pool is not None:
        return np.ones(B, bool)
    name = "decoder_" if of.family == "encoder_decoder" else ""
    positions = np.arange(given[f"{name}inputs"].shape[1])
    return positions < given[f"{name}lengths"][:, None]
