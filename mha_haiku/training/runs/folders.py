"""The folder of a run: the paths of its files, config.json, and loading the run."""

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import arrays, checks, display, fields, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import devices, evaluation, optimizers, stepping, tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import checkpoints, configuration, files, writable

_FORM = 2  # version of the folder's format
_FEW_LAYERS = 16  # whose shapes are found fast


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
    snapshots = _path("attention/snapshots")
    heads = _path("heads")
    timeline = _path("heads/timeline.jsonl")
    summary = _path("summary.json")
    lock = _path("lock.json")


class _Text(NamedTuple):
    """The data that a run has learned from; see `tasks.Kept`."""

    name: str
    sha256: str
    labels: tuple[str, ...] | None = None


class _Whole(NamedTuple):
    """The content of config.json, except its sha256."""

    form: int
    config: Mapping[str, Any]  # its fields are checked by their own declarations
    seed: int
    directory: str | None = None  # the working directory in which it was written
    text: _Text | None = None
    tokenizer_sha256: str | None = None
    data_sha256: str | None = None
    task_sha256: str | None = None
    start_sha256: str | None = None
    versions: Mapping[str, str] | None = None
    git_commit: str | None = None
    devices: tuple[str, ...] = ()


class Run(NamedTuple):
    """A run, loaded from its folder.

    Example:
      >>> run = mh.runs.load_run("runs/reverse")
      >>> run.step, run.model
      (30, Model(encoder: 2 layers of 2 heads, model size 8, learned positions))
      >>> run.examples(count=3).inputs.shape
      (3, 6)
    """

    config: configuration.RunConfig
    task: tasks.Task
    model: models.Model
    params: Any
    step: int
    # Of model and parameters; None for one device.
    placement: devices.Sharded | None = None

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


def of_runs(
    folder: Folder, config: configuration.RunConfig
) -> list[tuple[configuration.RunConfig, Folder]]:
    """Lists the config and folder of each run that a config describes."""
    if config.training.seeds == 1:
        return [(config, folder)]
    seeds = range(config.seed, config.seed + config.training.seeds)
    return [
        (
            config.replace(seed=seed, training=dict(seeds=1)),
            Folder(folder.root / f"seed_{seed}"),
        )
        for seed in seeds
    ]


def open_folder(workdir: str | os.PathLike, *, is_new: bool = False) -> Folder:
    """Opens the folder to train in; creates it if it is missing.

    The folder of a new run (`is_new`) may have a checkpoint of step 0 without a
    config.json, which a kill leaves. ConfigError if it holds files of the user, and
    no run, under the names of a run's files.
    """
    folder = Folder(writable.made("workdir", workdir))
    _check_unused(folder, is_new=is_new)
    return folder


def _check_unused(folder: Folder, *, is_new: bool) -> None:
    """Raises ConfigError if a folder without a run has what a run would replace."""
    if os.path.lexists(folder.config):
        return
    root, stored = folder.root, folder.checkpoints
    is_replaced = is_new and stored.is_dir()
    if is_replaced:
        is_replaced = checkpoints.Checkpoints(stored, read_only=True).is_begun()
    if os.path.lexists(stored) and not is_replaced:
        raise ConfigError(
            f"workdir {root} has checkpoints but no config.json to resume from."
        )
    # Next to config.json, which comes first, these are the run's.
    places = [folder.tokenizer, folder.data, folder.metrics, folder.summary]
    places += [folder.timeline]
    theirs = [path for path in places if os.path.lexists(path)]
    if not files.is_lock(folder.lock):
        theirs.append(folder.lock)
    if theirs:
        names = checks.listed([str(path.relative_to(root)) for path in theirs])
        raise ConfigError(
            f"workdir {root} holds no run, but {names}, which a run would replace.\n"
            "Take another folder."
        )


def load_run(
    workdir: str | os.PathLike, step: int | None = None, *, trust: bool = False
) -> Run:
    """Loads config, task, model and parameters of a run, of its newest step by default.

    With `trust` the file of a task from outside of this package is executed; then
    this process can read all runs of that file.

    Raises:
      ConfigError: If there is no run, or no checkpoint of that step, or it is damaged;
        if there are runs of several seeds, in separate folders; or if the file of your
        own task has changed, or would be executed without `trust`.

    Example:
      >>> mh.runs.load_run("runs/reverse")
      Run(reverse, step 30, Model(encoder: 2 layers of 2 heads, ...
      >>> mh.runs.load_run("runs/reverse", step=10).step
      10
    """
    folder = Folder(checks.as_path(workdir))

    def read_here():
        if changed := changed_task(folder):
            raise ConfigError(
                f"{changed}; the run in {folder.root} used the old one.\n"
                "Restore it, or train on with --override_config."
            )
        return (config := read_config(folder, trust=trust)) and config.to_json()

    saved = cluster.first_does(read_here)
    config = saved and configuration.of_json(saved, trust=trust)
    if config is None:
        raise ConfigError(f"There is no run in {folder.root}: it has no config.json.")
    if config.training.seeds > 1:
        roots = [run_folder.root for _, run_folder in of_runs(folder, config)]
        raise ConfigError(
            f"{folder.root} holds a run for each of several seeds: "
            f"{checks.listed([root.name for root in roots])}.\n"
            f"Name one of them, as {roots[0]}."
        )
    stored = []

    def open_here():
        stored.append(checkpoints.Checkpoints(folder.checkpoints, read_only=True))
        check_layers(config.model, stored[0], step)

    cluster.first_does(open_here)
    task = configuration.make_task(config, shared_kept(folder))
    configuration.check_length(config.model, task)
    model = make_model(config.model, task)
    abstract = abstract_state(config, task, model)
    abstract = stepping.Parameters(abstract.step, abstract.params)

    state = cluster.first_reads(
        lambda: stored[0].restore(abstract, step, partly=True), abstract
    )
    return Run(config, task, model, state.params, int(state.step))


def check_layers(
    model: models.ModelConfig,
    stored: checkpoints.Checkpoints,
    step: int | None = None,
) -> None:
    """Raises ConfigError if a config has more layers than a checkpoint has arrays.

    This is a cheap check before shapes, which take long to find. Scanned layers are
    rows of one array.
    """
    count = model.num_layers + models.num_decoder_layers(model)
    manifest = stored.manifest(step)
    shapes = [x["shape"] for x in manifest.arrays.values()]
    rows = [shape[0] for shape in shapes if shape and model.scan_layers]
    most = max(len(shapes), _FEW_LAYERS, *rows)
    if count > most:
        raise ConfigError(
            f"config.model.num_layers must be at most {most} for the arrays of the "
            f"checkpoint of step {manifest.step} in {stored.root}, got {count}."
        )


def shared_kept(folder: Folder) -> tasks.Kept | None:
    """Reads what a run stored of its task, or None, on all processes."""
    read = []

    def read_here():
        saved = _read_whole(folder) or {}
        tokenizer = _verified(folder.tokenizer, saved.get("tokenizer_sha256"))
        data = _verified(folder.data, saved.get("data_sha256"))
        read.append(data)
        # What is not UTF-8 becomes what no tokenizer accepts.
        text = (tokenizer or b"").decode(errors="surrogateescape")
        return text, saved.get("text"), data and len(data)

    tokenizer, text, size = cluster.first_does(read_here)
    if size is None:
        return tasks.Kept(tokenizer, text) if tokenizer else None
    abstract = jax.ShapeDtypeStruct((size,), np.uint8)
    data = cluster.first_reads(lambda: np.frombuffer(read[0], np.uint8), abstract)
    return tasks.Kept(
        tokenizer, text, arrays.read_npz(io.BytesIO(data), str(folder.data))
    )


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
) -> stepping.TrainState:
    """Finds the shapes and dtypes of the run's state, without computing it."""
    transformation = optimizers.make(config.optimizer, steps=config.training.steps)
    return jax.eval_shape(
        lambda: stepping.initial_state(model, transformation, task, config.seed)
    )


def read_config(
    folder: Folder, *, trust: bool = False
) -> configuration.RunConfig | None:
    """Reads the config of the run in the folder, or None for a new run.

    Files that are missing here are named from the directory in which it was written.
    """
    saved = _read_whole(folder)
    if saved is None:
        return None
    try:
        directory = saved.get("directory")
        return configuration.of_json(saved["config"], directory, trust=trust)
    except ConfigError as error:
        raise ConfigError(f"{folder.config} cannot be used: {error}") from error


def _verified(path: Path, sha256: str | None) -> bytes | None:
    """Reads a file and checks its sha256; returns None if it has none.

    If its process was killed, the file may still have the name `_next`.
    """
    if sha256 is None:
        return None
    try:
        if _sha256(_next(path)) == sha256:
            path = _next(path)
        content = checks.whole_file(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigError(f"{path} is not as it was written.")
    return content


def _next(path: Path) -> Path:
    """Names a file that replaces another once config.json asks for it."""
    return path.with_name(f"{path.name}.next")


def _sha256(path: Path) -> str | None:
    """Computes the sha256 of a file, None if it is missing."""
    if not path.exists():
        return None
    return hashlib.sha256(checks.whole_file(path)).hexdigest()


def changed_task(folder: Folder) -> str | None:
    """Returns a message if the file of the run's task has changed, else None."""
    saved = _read_whole(folder) or {}
    if (before := saved.get("task_sha256")) is None:
        return None
    section = saved["config"].get("task")
    name = section.get("name", "") if isinstance(section, dict) else ""
    name = configuration.task_found(str(name), saved.get("directory"))
    is_same = tasks.digest(name) == before
    return None if is_same else f"The file of config.task.name {name!r} has changed"


def write_config(
    folder: Folder,
    config: configuration.RunConfig,
    used: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    task: tasks.Task | None = None,
    start_sha256: str | None = None,
) -> None:
    """Writes config.json, and the task's data to tokenizer.json and data.npz.

    `start_sha256` is the `digest_of` parameters that were given to the run; by default
    what an earlier config.json says.
    """
    import haiku
    import jaxlib

    kept = (None if task is None else task.keep()) or tasks.Kept()
    if start_sha256 is None:
        start_sha256 = start_of(folder)
    _settle(folder)  # what a killed process has left
    try:
        if kept.tokenizer:
            files.write(_next(folder.tokenizer), kept.tokenizer)
        if (data := kept.arrays) is not None:
            files.write(
                _next(folder.data),
                lambda file: np.savez(file, **data),  # pyright: ignore[reportArgumentType]
            )
        contents = {
            "form": _FORM,
            "config": config.to_json(),
            "directory": _working_directory(),
            "seed": config.seed,
            "text": kept.text,
            "tokenizer_sha256": _sha256(_next(folder.tokenizer)),
            "data_sha256": _sha256(_next(folder.data)),
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
        files.write_json(folder.config, contents | {"sha256": _digest(contents)})
    finally:
        _settle(folder)


def _settle(folder: Folder) -> None:
    """Gives new files that config.json asks for their names, and removes others."""
    contents = files.read_json(folder.config) or {}
    for path, name in ((folder.tokenizer, "tokenizer"), (folder.data, "data")):
        if (digest := _sha256(_next(path))) is None:
            continue
        if digest == contents.get(f"{name}_sha256"):
            _next(path).replace(path)
        else:
            _next(path).unlink()


def check_free(workdir: str | os.PathLike) -> None:
    """Raises ConfigError unless `write_run` can write to a folder, missing or not."""
    folder = Folder(checks.as_path(workdir))
    if read_config(folder) is not None:
        raise ConfigError(f"{folder.root} holds a run; give an empty folder.")
    with writable.not_left_empty(folder.root):
        open_folder(folder.root, is_new=True)


def write_run(
    workdir: str | os.PathLike,
    config: configuration.RunConfig,
    params: Any,
    task: tasks.Task,
) -> Path:
    """Writes parameters as a new run at step 0, ready for training; returns its folder.

    If it fails or is interrupted, it leaves nothing. The checkpoint that a killed
    process has left is replaced: config.json is written last.
    """
    check_free(workdir)
    folder = Folder(checks.as_path(workdir))
    state = stepping.Parameters(np.int32(0), jax.tree.map(np.asarray, params))
    with contextlib.ExitStack() as stack:
        stack.enter_context(writable.not_left_empty(folder.root))
        open_folder(folder.root, is_new=True)
        stack.enter_context(files.locked(folder.lock))
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        try:
            with checkpoints.Checkpoints(folder.checkpoints) as stored:
                stored.save(0, state)
            devices, digest = jax.local_devices(), digest_of(params)
            write_config(folder, config, devices, task, digest)
        except BaseException:  # Ctrl-C too
            shutil.rmtree(folder.checkpoints, ignore_errors=True)
            raise
    return folder.root


def _read_whole(folder: Folder) -> dict[str, Any] | None:
    """Reads and verifies the files of `write_config`, or None without a config."""
    saved = files.read_json(folder.config)
    if saved is None:
        return None
    digest = saved.pop("sha256", None)
    if digest != _digest(saved):
        raise ConfigError(
            f"{folder.config} is not as it was written: its sha256 differs.\n"
            "Put back a copy of it, or take another workdir."
        )
    if saved.get("form") != _FORM:
        raise ConfigError(
            f"The run in {folder.root} has the form {saved.get('form')!r} of a newer "
            f"mha_haiku; this one reads {_FORM}."
        )
    try:
        fields.decoded(_Whole, saved, "")
    except ValueError as error:
        raise ConfigError(f"{folder.config} cannot be used: {error}") from None
    return saved


def directory_of(folder: Folder) -> str | None:
    """Reads the working directory in which config.json was written, or None."""
    return (files.read_json(folder.config) or {}).get("directory")


def start_of(folder: Folder) -> str | None:
    """Reads the `digest_of` the parameters that were given to the run, or None."""
    return (files.read_json(folder.config) or {}).get("start_sha256")


def digest_of(params: Any) -> str:
    """Computes the sha256 of parameters."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _digest(contents: Mapping[str, Any]) -> str:
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None


def _git_commit() -> str | None:
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
