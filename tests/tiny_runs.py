"""A task and a model small enough to check by hand, and a config of a tiny run."""

import dataclasses
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from mha_haiku import models, tasks
from mha_haiku.runs import loop


@dataclasses.dataclass(frozen=True)
class Shifted(tasks.Task):
    """The target is the token plus what the data says; a random part counts."""

    name: ClassVar[str] = "shifted"
    sequence_length: int = 5
    num_tokens: int = 7
    num_classes: int = 7

    # Numbers that tell training from held-out data apart.
    train_data = np.array([1, 1, 1], np.int32)
    held_out_data = np.array([3, 3, 3], np.int32)
    baseline: ClassVar[dict] = {"accuracy": 1 / 7, "loss": float(np.log(7))}

    def example(self, key: jax.Array, data: Any) -> tasks.Example:
        bits = jax.random.bits(key, (6,))
        inputs = (bits[:5] % 7).astype(jnp.int32)
        length = 1 + (bits[5] % 5).astype(jnp.int32)
        weights = (jnp.arange(5) < length).astype(jnp.float32)
        return tasks.Example(inputs, (inputs + data[0]) % 7, weights, None)


def linear_model(dropout_rate: float = 0.0) -> models.Model:
    """A table of logits by token, behind dropout."""

    def init(rng, inputs, lengths=None):
        return {"table": jax.random.normal(rng, (7, 7)), "bias": jnp.zeros(7)}

    def apply(params, rng, inputs, *, lengths=None, gates=None, is_training):
        one_hot = jax.nn.one_hot(inputs, 7)
        if is_training and dropout_rate:
            kept = jax.random.bernoulli(rng, 1 - dropout_rate, one_hot.shape)
            one_hot = jnp.where(kept, one_hot, 0)
        bias = params["bias"].reshape(1, 1, -1)
        return models.Output(one_hot @ params["table"] + bias, ())

    return models.Model(init, apply)


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory):
    """A folder for compiled programs: most tests of runs compile the same three."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def task():
    return Shifted()


@pytest.fixture
def make_model():
    return linear_model


@pytest.fixture
def make_config():
    """A function that makes a config that trains in a second, with fields replaced."""

    def make(**fields):
        config = ml_collections.ConfigDict()
        config.seed = 3
        config.task = {"name": "reverse", "sequence_length": 6, "num_tokens": 5}
        config.model = {
            "family": "encoder",
            "num_layers": 2,
            "num_heads": 2,
            "num_key_value_heads": None,
            "model_size": 8,
            "key_size": None,
            "hidden_size": 12,
            "activation": "relu",
            "norm": "layer_norm",
            "norm_epsilon": 1e-5,
            "norm_position": "pre",
            "positions": "learned",
            "max_length": 6,
            "dropout_rate": 0.1,
            "with_bias": True,
            "qk_norm": False,
            "precision": "float32",
            "rematerialize": False,
            "scan_layers": False,
            "smear_keys": False,
            "kept_heads": None,
            "hidden_sizes": None,
            "attention": {"implementation": "auto"},
        }
        config.optimizer = {
            "learning_rate": 1e-2,
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.1,
            "weight_decay": 0.01,
            "b1": 0.9,
            "b2": 0.98,
            "clip_norm": 1.0,
        }
        config.training = {
            "steps": 30,
            "batch_size": 8,
            "steps_per_dispatch": 4,
            "report_every": 5,
            "evaluate_every": 10,
            "evaluation_examples": 12,
            "checkpoint_every": 10,
            "timeline_every": 0,
            "non_finite": "abort",
            "max_skips": 3,
            "tensorboard": False,
        }
        config.attention = {
            "examples": 2,
            "dtype": "float16",
            "full_length": 256,
            "pooled_size": 128,
        }
        config.devices = {
            "data": None,
            "heads": 1,
            "sequence": 1,
            "shard_parameters": False,
        }
        for path, value in fields.items():
            *sections, field = path.split("__")
            section = config
            for name in sections:
                section = section[name]
            with section.ignore_type():
                section[field] = value
        return config

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Makes the folder of a run that has taken a few steps; one per set of fields."""
    made = {}

    def make(make_config, **fields):
        key = json.dumps(fields)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            loop.train(make_config(**fields), folder, devices=jax.local_devices()[:1])
            made[key] = folder
        return made[key]

    return make
