"""The folder of a run: where its files are, and what is read back from it."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections

from mha_haiku import devices, models, tasks
from mha_haiku.checks import ConfigError
from mha_haiku.devices import cluster
from mha_haiku.runs import checkpoints, configuration, files
from mha_haiku.training import optimizers, stepping


class Folder(NamedTuple):
    """The paths of a run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def attention(self) -> Path:
        return self.root / "attention"

    @property
    def heads(self) -> Path:
        return self.root / "heads"

    @property
    def timeline(self) -> Path:
        return self.heads / "timeline.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock.json"


class Run(NamedTuple):
    """A run that is back from its folder."""

    config: ml_collections.ConfigDict
    task: tasks.Task
    model: models.Model
    params: Any
    step: int
    placement: devices.Sharded | None = None  # of model and parameters; see `analysis`


def open_folder(workdir: str | os.PathLike) -> Folder:
    """Returns the folder for training in, made where it is missing.

    Raises:
      ConfigError: If it is a file, or cannot be written to.
    """
    root = Path(workdir).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"workdir must be a folder, but {root} is a file.") from None
    except OSError as error:
        raise ConfigError(f"workdir {root} cannot be made: {error.strerror}.") from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(f"workdir {root} must be writable.")
    folder = Folder(root)
    if folder.checkpoints.exists() and not folder.config.exists():
        raise ConfigError(
            f"workdir {root} has checkpoints but no config.json to resume from."
        )
    return folder


def load_run(workdir: str | os.PathLike, step: int | None = None) -> Run:
    """Returns config, task, model and parameters of a run.

    Args:
      workdir: The run's folder.
      step: Which checkpoint; None means the newest.

    Raises:
      ConfigError: If there is no run, or no checkpoint of that step.
    """
    folder = Folder(Path(workdir).expanduser())
    saved = cluster.first_does(lambda: read_config(folder))
    if saved is None:
        raise ConfigError(f"There is no run in {folder.root}: it has no config.json.")
    config = ml_collections.ConfigDict(saved)
    task = configuration.make_task(config)
    model = make_model(config, task)
    abstract = abstract_state(config, task, model)

    def restore():
        with checkpoints.Checkpoints(folder.checkpoints, read_only=True) as stored:
            return stored.restore(abstract, step)

    state = cluster.first_reads(restore, abstract)
    return Run(config, task, model, state.params, int(state.step))


def make_model(
    config: ml_collections.ConfigDict,
    task: tasks.Task,
    placement: devices.Placement | None = None,
) -> models.Model:
    """Returns the model that `config.model` describes, for the task.

    Args:
      config: The run's config.
      task: The task.
      placement: The devices that share its attention; None: any one of them.
    """
    implementation = config.model.attention.implementation
    if placement is not None:
        implementation = placement.implementation(implementation)
    return models.build(
        config.model,
        num_tokens=task.num_tokens,
        feature_size=task.feature_size,
        num_classes=task.num_classes,
        implementation=implementation,
    )


def abstract_state(
    config: ml_collections.ConfigDict, task: tasks.Task, model: models.Model
) -> stepping.TrainState:
    """Returns the shapes and dtypes of the run's state, computing nothing."""
    transformation = optimizers.make(config.optimizer, steps=config.training.steps)
    return jax.eval_shape(
        lambda: stepping.initial_state(model, transformation, task, config.seed)
    )


def read_config(folder: Folder) -> dict[str, Any] | None:
    """Returns the resolved config of the run in the folder, or None for a new run.

    Raises:
      ConfigError: If config.json is not what `write_config` writes.
    """
    saved = files.read_json(folder.config)
    if saved is None:
        return None
    if not isinstance(saved.get("config"), dict):
        raise ConfigError(f"{folder.config} must hold a run's config.")
    return saved["config"]


def write_config(
    folder: Folder, config: ml_collections.ConfigDict, used: Sequence[jax.Device]
) -> None:
    """Writes config.json: the resolved config and what it ran with."""
    import haiku
    import jaxlib

    contents = {
        "config": configuration.to_json(config),
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "haiku": haiku.__version__,
        },
        "git_commit": _git_commit(),
        "devices": [f"{device.device_kind} {device.id}" for device in used],
    }
    files.write_json(folder.config, contents)


def _git_commit() -> str | None:
    repository = Path(__file__).parents[2]
    if not (repository / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
