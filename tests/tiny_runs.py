"""A task and a model small enough to check by hand, and a config of a tiny run."""

import dataclasses
import json
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_haiku import models, runs, tasks
from mha_haiku.core import fields
from mha_haiku.training import evaluation, train_step
from mha_haiku.training.runs import checkpoints, configuration, folders, loop, trainers


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

    def apply(params, rng, inputs, *, lengths=None, is_training):
        one_hot = jax.nn.one_hot(inputs, 7)
        if is_training and dropout_rate:
            kept = jax.random.bernoulli(rng, 1 - dropout_rate, one_hot.shape)
            one_hot = jnp.where(kept, one_hot, 0)
        bias = params["bias"].reshape(1, 1, -1)
        return models.Output(one_hot @ params["table"] + bias, ())

    return models.Model(init, apply)


# What tests call fields of config.model for short.
_SHORT = {
    "positions": ["embedding.positions"],
    "max_length": ["embedding.max_length"],
    "with_bias": [
        "attention.with_bias",
        "attention.output_bias",
        "feed_forward.with_bias",
    ],
    "hidden_size": ["feed_forward.hidden_size"],
    "hidden_sizes": ["feed_forward.hidden_sizes"],
    "activation": ["feed_forward.activation"],
    "norm": ["norm.kind"],
    "norm_epsilon": ["norm.epsilon"],
    "norm_position": ["norm.position"],
} | {
    name: [f"attention.{name}"]
    for name in (
        "num_heads",
        "num_key_value_heads",
        "key_size",
        "qk_norm",
        "smear_keys",
        "kept_heads",
    )
}


def with_fields(path, config, changes):
    """Returns a section with fields replaced.

    Args:
      path: The section's name, as `config.model`.
      config: The section.
      changes: Values by name, as `attention__num_heads`, or by a name of `_SHORT`.
    """
    dotted = {}
    for name, value in changes.items():
        short = name.removeprefix("model__")
        is_model = path == "config.model" or short != name
        names = _SHORT.get(short, []) if is_model else []
        before = "model." if short != name else ""
        for whole in [before + each for each in names] or [name.replace("__", ".")]:
            dotted[whole] = value
    return config.replace(**fields.nested(dotted))


def model_config(**changes):
    """Returns the default `config.model` with fields replaced; see `with_fields`."""
    return with_fields("config.model", models.ModelConfig(), changes)


def write_untrained(root, config, *, step: int = 3, value: float | None = None):
    """Makes the folder of a run, with a checkpoint of random numbers or of one.

    Args:
      root: The folder.
      config: Of the run.
      step: Of the checkpoint.
      value: What all parameters are; None: normal.

    Returns:
      The folder.
    """
    task = configuration.make_task(config)
    abstract = folders.abstract_state(
        config, task, folders.make_model(config.model, task)
    )
    numbers = np.random.default_rng(0)

    def drawn(x):
        array = numbers.standard_normal(x.shape) if value is None else value
        return np.broadcast_to(np.asarray(array, x.dtype), x.shape)

    state = jax.tree.map(drawn, abstract)._replace(step=np.int32(step))
    folder = folders.Folder(pathlib.Path(root))
    folders.write_config(folder, config, jax.local_devices()[:1], task)
    checkpoints.save(folder.checkpoints, step, state)
    return folder.root


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory):
    """A folder for compiled programs: most tests of runs compile the same three.

    Processes that tests start from now on share it; other workers have their own, as
    JAX may read what another process has written in part.
    """
    folder = str(tmp_path_factory.mktemp("compiled"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("jax_compilation_cache_dir", folder),
            ("jax_persistent_cache_min_compile_time_secs", 0.0),
            ("jax_persistent_cache_min_entry_size_bytes", -1),
        ):
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        yield folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session", autouse=True)
def _traced_once():
    """Trainings of one config in a process trace and compile their programs once.

    Every training makes its jitted functions anew; here the ones of before are given.
    """
    kept, prepare = {}, trainers.Trainer.__init__

    def prepare_once(self, config, task, placement, **options):
        fields = {**config.to_json(), "seed": None, "attention": None}
        key = (
            json.dumps(fields, sort_keys=True, default=repr),
            (task, tuple(placement.devices)),
            (folders.make_model, train_step.gradients),  # which tests replace
            (options.get("model"), options.get("optimizer")),
        )

        def once(make):
            def made(*args, **options):
                if (make, key) not in kept:
                    kept[make, key] = make(*args, **options)
                return kept[make, key]

            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_step, "make_dispatch", once(train_step.make_dispatch))
            patch.setattr(
                evaluation, "make_evaluation", once(evaluation.make_evaluation)
            )
            prepare(self, config, task, placement, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers.Trainer, "__init__", prepare_once)
        yield


@pytest.fixture
def task():
    return Shifted()


@pytest.fixture
def make_model():
    return linear_model


@pytest.fixture(scope="session")
def make_config():
    """A function that makes a config that trains in a second, with fields replaced."""

    def make(**changes):
        config = runs.default_config("reverse").replace(
            seed=3,
            task=dict(sequence_length=6, num_tokens=5),
            model=dict(
                num_layers=2,
                model_size=8,
                dropout_rate=0.1,
                embedding=dict(max_length=6),
                attention=dict(num_heads=2),
                feed_forward=dict(hidden_size=12, activation="relu"),
            ),
            optimizer=dict(warmup_steps=5, weight_decay=0.01),
            training=dict(
                steps=30,
                batch_size=8,
                steps_per_dispatch=4,
                report_every=5,
                evaluate_every=10,
                evaluation_examples=12,
                checkpoint_every=10,
            ),
            attention=dict(examples=2),
        )
        return with_fields("config", config, changes)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory, make_config):
    """Makes the folder of a run that has taken a few steps; one per set of fields."""
    made = {}

    def make(**fields):
        key = json.dumps(fields)
        if key not in made:
            folder = tmp_path_factory.mktemp("runs") / "run"
            loop.train(make_config(**fields), folder, devices=jax.local_devices()[:1])
            made[key] = folder
        return made[key]

    return make


def check_devices(config, count):
    """Checks that so many devices can share the work of a config."""
    sections = config.devices, config.model, config.training
    configuration.check_devices(*sections, count)
