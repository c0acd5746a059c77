"""The folder of a run: the paths of its files, config.json, and loading the run."""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import arrays, checks, display, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import devices, evaluation, optimizers, tasks, train_step
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import checkpoints, configuration, files

_FORM = 2  # version of the folder's format


def _path(name: str) -> property:
    return property(lambda self: self.root / name)


class Folder(NamedTuple):
    """The paths of a run's folder."""

    root: Path

    config = _path("config.json")
    tokenizer = _path("tokenizer.json")
    data = _path("data.npz")
    metrics = _path("metrics.jsonl")
    checkpoints = _path("checkpoints")
    attention = _path("attention")
    heads = _path("heads")
    summary = _path("summary.json")


class Run(NamedTuple):
    """A run, loaded from its folder."""

    config: configuration.RunConfig
    task: tasks.Task
    model: models.Model
    params: Any
    step: int

    def __repr__(self) -> str:
        count = sum(x.size for x in jax.tree.leaves(self.params))
        task = self.config.task.name
        return f"Run({task}, step {self.step:,}, {self.model}, {count:,} parameters)"

    def _repr_html_(self) -> str:
        return display.html(self)

    def examples(self, count: int) -> tasks.Example:
        """Makes the first held-out examples, a batch of B = `count`.

        Raises:
          ValueError: If `count` is not an integer above 0.
        """
        indices = np.arange(checks.positive_integer("count", count), dtype=np.int32)
        return evaluation.held_out_batch(
            self.task, self.config.seed, self.task.held_out_data, indices
        )

    def looped(self) -> "Run":
        """Unstacks the layers of the run, so that they can be accessed one by one."""
        if not self.config.model.scan_layers:
            return self
        config = self.config.replace(model=dict(scan_layers=False))
        model = make_model(config.model, self.task)
        params = models.unstacked(self.params)
        return self._replace(config=config, model=model, params=params)


@contextlib.contextmanager
def held(folder: Folder) -> Iterator[configuration.RunConfig | None]:
    """Locks a folder to train in while entered; yields the config of the run in it.

    A missing folder is made, and removed again if no run has begun in it. ConfigError
    if it is in use, cannot be written, or holds other files and no run.
    """
    root, log = folder.root, folder.metrics
    files.check_writable_here("workdir", root)
    if not folder.config.exists() and root.exists():
        names = [name for name in os.listdir(root) if name[0] != "."]
        if names == [log.name] and not log.stat().st_size:
            names = []  # what a killed start leaves
        if names:
            raise ConfigError(
                f"workdir {root} holds no run, but {checks.listed(names, 4)}.\n"
                "Take another folder, or an empty one."
            )
    read_config(folder)  # its mistakes, before the log is opened
    missing = [each for each in (root, *root.parents) if not each.exists()]
    root.mkdir(parents=True, exist_ok=True)
    with files.locked(log):
        try:
            yield read_config(folder)
        finally:
            if not folder.config.exists():
                shutil.rmtree(folder.checkpoints, ignore_errors=True)
                log.unlink()
                for each in missing:
                    each.rmdir()


def load_run(
    workdir: str | os.PathLike, step: int | None = None, *, trust: bool = False
) -> Run:
    """Loads config, task, model and parameters of a run, of its newest step by default.

    With `trust` the file of a task from outside of this package is executed; then
    this process can read all runs of that file.

    Raises:
      ConfigError: If there is no run, or no checkpoint of that step, or it is damaged;
        or if the file of your own task has changed, or would be executed without
        `trust`.

    Example:
      >>> mh.runs.load_run("runs/reverse")
      Run(reverse, step 30, Model(encoder: 2 layers of 2 heads, ...
      >>> mh.runs.load_run("runs/reverse", step=10).step
      10
    """
    folder = Folder(checks.as_path(workdir))

    def read_here() -> dict[str, Any]:
        if changed := changed_task(folder):  # before it is executed
            raise ConfigError(
                f"{changed}; the run in {folder.root} used the old one.\n"
                "Restore it, or train on with --override_config."
            )
        config = read_config(folder, trust=trust)
        if config is None:
            raise ConfigError(
                f"There is no run in {folder.root}: it has no config.json."
            )
        if config.task.name == tasks.Wrapped.name:
            how = "cannot make again.\nThe same call of train opens it"
            trained = f"{folder.root} trained {config.task.of}"
            raise ConfigError(f"The run in {trained}, which it {how}.")
        stored = checkpoints.read(folder.checkpoints, step)
        return {
            "config": config.to_json(),
            "kept": read_kept(folder),
            "arrays": stored.arrays([f".{x}" for x in train_step.Parameters._fields]),
        }

    content = cluster.first_does(read_here)
    config = configuration.of_json(content["config"])
    kept = content["kept"] and tasks.Kept(**content["kept"])
    task = configuration.make_task(config, kept)
    configuration.check_length(config.model, task)
    model = make_model(config.model, task)
    abstract = abstract_state(config, task, model)
    abstract = train_step.Parameters(abstract.step, abstract.params)
    state = checkpoints.restored(content["arrays"], abstract)
    return Run(config, task, model, state.params, int(state.step))


def read_kept(folder: Folder, *, with_data: bool = True) -> dict[str, Any] | None:
    """Reads the fields of the `tasks.Kept` that a run has stored, or None."""
    saved = _read_saved(folder) or {}
    tokenizer, data = "", None
    if folder.tokenizer.exists():
        tokenizer = checks.text_of(folder.tokenizer, folder.tokenizer)
    if with_data and folder.data.exists():
        data = arrays.read_npz(folder.data)
    if not tokenizer and data is None:
        return None
    return {"tokenizer": tokenizer, "text": saved.get("text"), "arrays": data}


def make_model(
    config: models.ModelConfig,
    task: tasks.Task,
    placement: devices.Placement | None = None,
) -> models.Model:
    """Makes the model that a config describes, for the task."""
    implementation = config.attention.implementation
    if placement is not None:
        implementation = placement.implementation(implementation)
    return models.build(
        config,
        num_tokens=task.num_tokens,
        feature_size=task.feature_size,
        num_classes=task.num_classes,
        implementation=implementation,
    )


def abstract_state(
    config: configuration.RunConfig, task: tasks.Task, model: models.Model
) -> train_step.TrainState:
    """Finds the shapes and dtypes of the run's state, without computing it."""
    transformation = optimizers.make(config.optimizer, steps=config.training.steps)
    return jax.eval_shape(
        lambda: train_step.initial_state(model, transformation, task, config.seed)
    )


def read_config(
    folder: Folder, *, trust: bool = False
) -> configuration.RunConfig | None:
    """Reads the config of the run in the folder, or None for a new run.

    A file with a user's task is executed only with `trust`.
    """
    saved = _read_saved(folder)
    if saved is None:
        return None
    try:
        name = configuration.task_name(saved.get("config"))
        if trust or not tasks.executes(name):
            return configuration.of_json(saved["config"])
    except ConfigError as error:
        first, *_ = str(error).splitlines()
        raise ConfigError(
            f"{folder.config} cannot be used: {first}\nIf another version wrote it, "
            "make the run anew: python -m mha_haiku train --config=... --workdir=..."
        ) from error
    raise ConfigError(
        f"config.task.name {name!r} would execute the file "
        f"{name.rpartition(':')[0]!r}.\nWhere you trust it, allow that by "
        "mha_haiku.load(..., trust=True), or by --trust."
    )


def changed_task(folder: Folder) -> str | None:
    """Returns a message if the file of the run's task has changed, else None."""
    saved = _read_saved(folder) or {}
    if (before := saved.get("task_sha256")) is None:
        return None
    name = configuration.task_name(saved["config"])
    is_same = tasks.digest(name) == before
    return None if is_same else f"The file of config.task.name {name!r} has changed"


def write_config(
    folder: Folder,
    config: configuration.RunConfig,
    used: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    task: tasks.Task | None = None,
    start_sha256: str | None = None,
) -> None:
    """Writes config.json, the task's tokenizer.json and data.npz.

    `start_sha256` is the `digest_of` parameters that were given to the run; by default
    what an earlier config.json says.
    """
    import haiku
    import jaxlib

    kept = (None if task is None else task.keep()) or tasks.Kept()
    if start_sha256 is None:
        start_sha256 = start_of(folder)
    contents = {
        "form": _FORM,
        "config": config.to_json(),
        "seed": config.seed,
        "text": kept.text,
        "task_sha256": tasks.digest(config.task.name),
        "start_sha256": start_sha256,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,  # pyright: ignore[reportPrivateImportUsage]
            "haiku": haiku.__version__,
        },
        "git_commit": _git_commit(),
        "devices": [f"{device.device_kind} {device.id}" for device in used],
    }
    files.write_json(folder.config, contents)
    if kept.tokenizer:
        files.write(folder.tokenizer, kept.tokenizer)
    if (data := kept.arrays) is not None:
        files.write(folder.data, lambda file: np.savez(file, **data))  # pyright: ignore[reportArgumentType]


def check_free(workdir: str | os.PathLike) -> None:
    """Raises ConfigError unless `write_run` can write to a folder, missing or not."""
    folder = Folder(checks.as_path(workdir))
    with held(folder) as saved:
        if saved is not None:
            raise ConfigError(f"{folder.root} holds a run; give an empty folder.")


def write_run(
    workdir: str | os.PathLike,
    config: configuration.RunConfig,
    params: Any,
    task: tasks.Task,
) -> Path:
    """Writes parameters as a new run at step 0, ready for training; returns its folder.

    If it fails or is interrupted, it leaves nothing.
    """
    folder = Folder(checks.as_path(workdir))
    params = jax.tree.map(np.asarray, params)
    check_free(workdir)
    with held(folder):
        state = train_step.Parameters(np.int32(0), params)
        checkpoints.save(folder.checkpoints, 0, state)
        write_config(folder, config, jax.local_devices(), task, digest_of(params))
    return folder.root


def _read_saved(folder: Folder) -> dict[str, Any] | None:
    """Reads config.json, or None without one."""
    saved = files.read_json(folder.config)
    if saved is None:
        return None
    if saved.get("form") != _FORM:
        raise ConfigError(
            f"{folder.config} has the form {saved.get('form')!r} of a newer mha_haiku; "
            f"this one reads {_FORM}."
        )
    return saved


def start_of(folder: Folder) -> str | None:
    """Reads the `digest_of` the parameters that were given to the run, or None."""
    return (files.read_json(folder.config) or {}).get("start_sha256")


def digest_of(params: Any) -> str:
    """Computes the sha256 of parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _git_commit() -> str | None:
    """Returns the commit of the checkout that this code is in, if it is in one."""
    repository = Path(__file__).parents[3]
    if not (repository / ".git").exists():
        return None
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
