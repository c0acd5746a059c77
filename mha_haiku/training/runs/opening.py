"""Starts a run: one process opens its folder, and all resume where it stopped."""

import contextlib
import json
import os
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from mha_haiku.core import checks, fields
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import checkpoints, configuration, files, folders


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


def _open_run(stack, config, folder, override) -> Opened:
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


def _open_folder(stack, folder, *seeds) -> configuration.RunConfig | None:
    """Opens and locks a folder of `seeds`, their number and the first of them.

    Returns the config of the run in it.
    """
    stack.enter_context(folders.not_left_empty(folder.root))
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


def _check_unchanged(folder, saved, config, override, latest) -> bool:
    """Checks whether the run's config differs; refuses that without `override`."""
    if latest is not None and saved.init_from != config.init_from:
        raise ConfigError(
            f"config.init_from must be {saved.init_from!r}, from which the run in "
            f"{folder.root} has started, got {config.init_from!r}.\n"
            "It has parameters; take another workdir to start from others."
        )
    lines = configuration.difference(saved.to_json(), config.to_json())
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


def _finished(folder, steps, latest) -> Summary | None:
    contents = files.read_json(folder.summary)
    if contents is None or set(contents) != set(Summary._fields):
        return None
    try:
        summary = fields.decoded(Summary, contents, "")
    except ValueError as error:
        raise ConfigError(f"{folder.summary} cannot be used: {error}") from None
    is_whole = summary.steps == latest == steps and not summary.interrupted
    return summary if is_whole else None
