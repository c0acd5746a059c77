"""Small models of every kind of heads, with random parameters, and data for them."""

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku import models, tasks
from tests import oracles, tiny_models

B, T, C, D, H, K, F, L = 3, 5, 7, 10, 4, 6, 11, 3
NUM_TOKENS = 13


def config(**fields):
    """Returns the config of a model of causal attention, with fields replaced."""
    own = {"family": "causal", "num_layers": L, "dropout_rate": 0.1}
    own |= {"attention__num_heads": H, "attention__key_size": K}
    return tiny_models.config(**own | fields)


def fresh(of):
    """Returns the model of a config, for which nothing is compiled yet."""
    return models.build(of, num_tokens=NUM_TOKENS, feature_size=None, num_classes=C)


_built = {}


def build(of):
    """Returns the model of a config, the same to all: programs are kept by model."""
    key = repr(of)
    if key not in _built:
        _built[key] = fresh(of)
    return _built[key]


def random_params(of, seed=0):
    """Returns random parameters for a config, biases and scales too."""
    tokens = {"inputs": np.zeros((B, T), np.int32)}
    return tiny_models.random_parameters(build(of), tokens, seed=seed)


def example(seed=0, count=B, lengths=None):
    """Returns a batch of random tokens and targets; not all targets count."""
    generator = np.random.default_rng(seed)
    return tasks.Example(
        generator.integers(0, NUM_TOKENS, (count, T)).astype(np.int32),
        generator.integers(0, C, (count, T)).astype(np.int32),
        (generator.uniform(size=(count, T)) < 0.8).astype(np.float32),
        lengths,
    )


def oracle(of, params, batch, gates=None, passed=None, changes=None):
    """Returns logits and all values by name, by the formula, of gated heads.

    Args:
      of: `config.model`.
      params: Of looped layers.
      batch: The batch.
      gates: `[P, H]`; None: open.
      passed: What ablated heads of each of the P parts pass on; None: zeros.
      changes: Of other values, by name; see `oracles.recorded`.
    """
    changes = dict(changes or {})
    for i, part in enumerate(models.heads_of_layers(of) if gates is not None else ()):
        gate = np.asarray(gates[i], np.float64)[:, None]
        other = 0 if passed is None else (1 - gate) * passed[i]
        changes[f"{part.path}/heads"] = lambda x, gate=gate, other=other: (
            gate * x + other
        )
    return oracles.recorded(
        params,
        batch.inputs,
        of,
        lengths=batch.lengths,
        decoder_tokens=batch.decoder_inputs,
        decoder_lengths=batch.decoder_lengths,
        changes=changes,
    )


def loss(logits, batch):
    """Returns the weighted cross-entropy of each example, `[B]`."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch.targets[..., None], -1
    )
    return -(chosen[..., 0] * batch.weights).sum(-1)
