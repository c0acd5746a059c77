"""Starts a run: opens its folder, in which it resumes, or begins from another run."""

import contextlib
import json
import os
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mha_haiku.core import checks, fields, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import forward
from mha_haiku.training import tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import checkpoints, configuration, files, folders, writable

Params = Mapping[str, Mapping[str, Any]]

# Fields of config.model in which a run may differ from the run that it starts from: the
# parameters mean the same.
_FREE = tuple(
    f"config.model.{field}"
    for field in (
        "family",
        "dropout_rate",
        "precision",
        "rematerialize",
        "scan_layers",
        "embedding.max_length",
        "embedding.rotary_period",
        "embedding.frequencies",
        "attention.window",
        "attention.temperature",
        "attention.implementation",
        "output.",
    )
)
_MOST_SHOWN = 3


class Summary(NamedTuple):
    """The end of a run: the content of summary.json.

    Example:
      >>> config = mh.runs.load_run("runs/reverse").config
      >>> summary = mh.runs.train(config, "runs/reverse")
      The run in runs/reverse has ended at step 30.
      >>> summary.steps, summary.interrupted, summary.baseline_name
      (30, False, 'chance')
    """

    steps: int  # taken in all
    metrics: dict[str, float]  # of the last report
    baseline: dict[str, float]  # of the best answer without the input
    baseline_name: str
    interrupted: bool  # by SIGINT or SIGTERM, before the last step
    resumed_from: int  # the step this process started at
    skipped_steps: int  # of the whole run, those with a nonfinite loss or gradient
    wall_seconds: float  # of this process, inside `train`
    compile_seconds: float
    steps_per_second: float  # of training only: no compilation, evaluation or saving
    examples_per_second: float


class SeedsSummary(NamedTuple):
    """The end of runs of several seeds that trained together: their summary.json.

    Each seed's folder has a `Summary`; fields with the same names summarize all seeds.

    Example:
      >>> config = mh.runs.default_config("reverse")
      >>> config = config.replace(training=dict(steps=4, seeds=2))
      >>> summary = mh.runs.train(config, "runs/seeds")
      reverse starts: 2 models...
      >>> summary.seeds, summary.steps, sorted(summary.spread)
      ([0, 1], 4, [...'accuracy'...])
    """

    seeds: list[int]
    failed: dict[str, str]  # by seed: why it did not finish
    steps: int  # the fewest, of those that did not fail
    metrics: dict[str, float]  # means over the seeds that did not fail
    spread: dict[str, float]  # standard deviations, of two seeds at least
    each: dict[str, dict[str, float]]  # the metrics by seed
    baseline: dict[str, float]
    baseline_name: str
    interrupted: bool
    resumed_from: int  # the fewest
    skipped_steps: int  # of all
    wall_seconds: float
    compile_seconds: float
    steps_per_second: float  # of each
    examples_per_second: float  # of all


# Fields of `SeedsSummary`, by what they are of the fields of all seeds.
_JOINED = {
    "steps": min,
    "interrupted": any,
    "resumed_from": min,
    "skipped_steps": sum,
    "wall_seconds": max,
    "compile_seconds": max,
    "steps_per_second": statistics.fmean,
    "examples_per_second": sum,
}


class Opened(NamedTuple):
    """A run's folder, open for training."""

    config: configuration.RunConfig
    folder: folders.Folder
    stored: checkpoints.Checkpoints | checkpoints.Elsewhere  # entered
    finished: Summary | None  # the summary if the run has ended already, else None


def open_runs(
    stack: contextlib.ExitStack,
    config: configuration.RunConfig,
    workdir: str | os.PathLike,
    *,
    override_config: bool,
) -> list[Opened]:
    """Opens the folders of all runs that a config describes, on the first process.

    They are locked until the stack closes. All processes raise ConfigError if the
    config does not fit; see `loop.train`.
    """
    texts = cluster.exchange(json.dumps(config.to_json()))
    first, *others = map(json.loads, texts)
    for i, other in enumerate(others, start=1):
        if lines := configuration.difference(first, other):
            raise ConfigError(
                f"All processes must have the same config; from process 0 to {i}: "
                f"{'; '.join(lines[:4])}."
            )
    root = folders.Folder(checks.as_path(workdir))
    seeds = config.training.seeds, config.seed
    if config.training.seeds > 1:
        cluster.first_does(lambda: _open_folder(stack, root, *seeds) is not None)
    return [
        _open_run(stack, run_config, folder, override_config)
        for run_config, folder in folders.of_runs(root, config)
    ]


class Start(NamedTuple):
    """The run to start from."""

    path: str  # `config.init_from`
    run: folders.Run  # with looped layers
    kept: tasks.Kept | None  # its tokenizer, for any text

    def __str__(self) -> str:
        return f"Embeddings and layers are from {self.path}, step {self.run.step}."


def load_start(config: configuration.RunConfig) -> Start:
    """Loads the run that `config.init_from` names; with several processes, on all."""
    path = config.init_from
    run = folders.load_run(path).looped()
    kept = folders.shared_kept(folders.Folder(checks.as_path(path)))
    own, its = (getattr(x.data, "tokenizer", None) for x in (config, run.config))
    has, name = None, run.config.task.name
    if kept is not None and its is None and config.task.name != name:
        has = f"only tokens of the task {name!r}"
    elif own != its:
        has = f"config.data.tokenizer {its!r}" if its else "no tokenizer"
        has += f", and this run has {repr(own) if own else 'none'}"
    if has is not None:
        raise ConfigError(
            "config.init_from must be a run with the same kind of tokens; "
            f"{path} has {has}."
        )
    return Start(path, run, kept and kept._replace(text=None))


def start_params(
    source: Start, config: configuration.RunConfig, task: tasks.Task, new: Params
) -> Params:
    """Chooses the parameters to start with: of `source`, or of a `new` model.

    Embeddings and layers are copied; the logits are copied if they have the same
    classes, and are new otherwise. A table of tokens may have more or fewer rows than
    the other run's table, as for [MASK] or [CLS]: with the same tokenizer, the rows of
    its tokens come first.
    """
    is_scanned = config.model.scan_layers
    own = dict(models.unstacked(new) if is_scanned else new)
    its = dict(source.run.params)
    same_classes = _classes(task) == _classes(source.run.task)
    for module in forward.OUTPUT_MODULES:
        shapes = [jax.tree.map(np.shape, x.get(module)) for x in (own, its)]
        if not same_classes or shapes[0] != shapes[1]:
            its.pop(module, None)
    fresh = [name for name in forward.OUTPUT_MODULES if name in own and name not in its]
    if source.kept is not None and {"embedding"} <= set(own) & set(its):
        its["embedding"] = _with_rows_of(its["embedding"], own["embedding"])
    _check_alike(source, config, own, its, fresh)
    taken = {name: own[name] if name in fresh else its[name] for name in own}
    return models.stacked(taken) if is_scanned else taken


def _open_run(
    stack: contextlib.ExitStack,
    config: configuration.RunConfig,
    folder: folders.Folder,
    override: bool,
) -> Opened:
    opened = []

    def open_here():
        saved = _open_folder(stack, folder, config.training.seeds, config.seed)
        stored = checkpoints.Checkpoints(folder.checkpoints)
        latest, is_changed = stored.latest(), False
        if saved is not None:
            is_changed = _check_unchanged(folder, saved, config, override, latest)
        if latest is not None:
            folders.check_layers(config.model, stored, latest)
        opened.append(stored)
        steps = config.training.steps
        finished = None if is_changed else _finished(folder, steps, latest)
        if finished is None and (latest or 0) > steps:
            raise ConfigError(
                f"config.training.steps must be at least the {latest} steps that the "
                f"run has taken, got {steps}."
            )
        return {"finished": finished and finished._asdict(), "latest": latest}

    shared = cluster.first_does(open_here)
    stored = opened[0] if opened else checkpoints.Elsewhere(shared["latest"])
    finished = shared["finished"] and Summary(**shared["finished"])
    return Opened(config, folder, stack.enter_context(stored), finished)


def whole(
    summaries: Mapping[int, Summary], failed: Mapping[int, str]
) -> Summary | SeedsSummary:
    """Summarizes a run, or all runs that trained together."""
    if len(summaries) == 1 and not failed:
        return next(iter(summaries.values()))
    summaries = dict(sorted(summaries.items()))
    ended = list(summaries.values())
    names = [name for name in ended[0].metrics if all(name in x.metrics for x in ended)]
    values = {name: [summary.metrics[name] for summary in ended] for name in names}
    joined = {
        name: function([getattr(summary, name) for summary in ended])
        for name, function in _JOINED.items()
    }
    return SeedsSummary(
        seeds=sorted([*summaries, *failed]),
        failed={str(seed): why for seed, why in failed.items()},
        metrics={name: statistics.fmean(x) for name, x in values.items()},
        spread={name: statistics.stdev(x) for name, x in values.items() if len(x) > 1},
        each={str(seed): x.metrics for seed, x in summaries.items()},
        baseline=ended[0].baseline,
        baseline_name=ended[0].baseline_name,
        **joined,
    )


def _open_folder(
    stack: contextlib.ExitStack, folder: folders.Folder, *seeds: int
) -> configuration.RunConfig | None:
    """Opens and locks a folder of `seeds`, their number and the first of them.

    Returns the config of the run in it.
    """
    stack.enter_context(writable.not_left_empty(folder.root))
    folders.open_folder(folder.root)
    stack.enter_context(files.locked(folder.lock))
    saved = folders.read_config(folder)
    has = (saved.training.seeds, saved.seed) if saved else seeds
    if has[0] != seeds[0] or (has[0] > 1 and has != seeds):
        raise ConfigError(
            f"config.training.seeds must be {has[0]} and config.seed {has[1]}, as of "
            f"the run in {folder.root}, got {seeds[0]} and {seeds[1]}.\n"
            "Take another workdir for other seeds."
        )
    return saved


def _check_unchanged(
    folder: folders.Folder,
    saved: configuration.RunConfig,
    config: configuration.RunConfig,
    override: bool,
    latest: int | None,
) -> bool:
    """Checks whether the run's config differs; refuses that without `override`."""
    if latest is not None and saved.init_from != config.init_from:
        raise ConfigError(
            f"config.init_from must be {saved.init_from!r}, from which the run in "
            f"{folder.root} has started, got {config.init_from!r}.\n"
            "It has parameters; take another workdir to start from others."
        )
    given = configuration.found(config, folders.directory_of(folder))
    lines = configuration.difference(saved.to_json(), given.to_json())
    # How devices divide the work does not change its results.
    lines = [line for line in lines if not line.startswith("config.devices")]
    if latest == 0:  # only parameters: how they are trained is still open
        fixed = ("config.model.", "config.task.name", "config.data.tokenizer")
        override = override or not any(line.startswith(fixed) for line in lines)
    if config.task.name == saved.task.name:
        lines += filter(None, [folders.changed_task(folder)])
    if lines and not override:
        more = [f"and {len(lines) - 4} more"] if len(lines) > 4 else []
        raise ConfigError(
            f"The run in {folder.root} has another config: "
            f"{'; '.join(lines[:4] + more)}.\n"
            "Take another workdir, or pass override_config to resume this one."
        )
    return bool(lines)


def _finished(folder: folders.Folder, steps: int, latest: int | None) -> Summary | None:
    contents = files.read_json(folder.summary)
    if contents is None or set(contents) != set(Summary._fields):
        return None
    try:
        summary = fields.decoded(Summary, contents, "")
    except ValueError as error:
        raise ConfigError(f"{folder.summary} cannot be used: {error}") from None
    is_whole = summary.steps == latest == steps and not summary.interrupted
    return summary if is_whole else None


def _classes(task: tasks.Task) -> list[str]:
    return [task.class_label(c) for c in range(task.num_classes)]


def _shapes(params: Params, left_out: list[str]) -> dict[str, tuple[int, ...]]:
    return {
        f"{module} {name}": np.shape(x)
        for module, leaves in params.items()
        for name, x in leaves.items()
        if module not in left_out
    }


def _with_rows_of(
    its: dict[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Makes tables of the size of `own`: the rows of `its`, then of `own`."""
    widths, other = ({k: np.shape(x)[1:] for k, x in y.items()} for y in (own, its))
    if widths != other:
        return its
    return {
        name: np.concatenate([its[name][: len(x)], x[len(its[name]) :]])
        for name, x in own.items()
    }


def _check_alike(
    source: Start,
    config: configuration.RunConfig,
    own: Params,
    its: Params,
    fresh: list[str],
) -> None:
    here, there = (_shapes(params, fresh) for params in (own, its))
    differ = [
        f"{name} ({_size(there.get(name))} there, {_size(here.get(name))} here)"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    there, here = ({"model": x.model.to_json()} for x in (source.run.config, config))
    changed = configuration.difference(there, here)
    changed = [line for line in changed if not line.startswith(_FREE)]
    if differ or changed:
        what = checks.listed(differ, _MOST_SHOWN) or "what its parameters mean"
        raise ConfigError(
            f"config.init_from must be a run of the same model; {source.path} differs "
            f"in {what}.\nFields there and here: "
            f"{checks.listed(changed, _MOST_SHOWN) or 'the same'}."
        )


def _size(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " x ".join(map(str, shape)) or "a number"
