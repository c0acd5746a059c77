"""The training loop, which owns a run's input and output.

Between reports nothing happens on the host but a dispatch of many steps; see `step.py`.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import ml_collections

from mha_haiku import checkpoints
from mha_haiku.checks import ConfigError
from mha_haiku.training import config as run_config
from mha_haiku.training import interruption, lock, metrics_log
from mha_haiku.training import placement as run_placement
from mha_haiku.training import progress as run_progress
from mha_haiku.training import run as run_folder
from mha_haiku.training import timeline as run_timeline

_logger = logging.getLogger("mha_haiku")


class Summary(NamedTuple):
    """How a run ended; summary.json."""

    steps: int  # taken in all
    metrics: dict[str, float]  # of the last report
    baseline: dict[str, float]  # of the best answer that ignores the input
    baseline_name: str
    interrupted: bool  # by SIGINT or SIGTERM, before the last step
    resumed_from: int  # the step this process started at
    skipped_steps: int  # of all, those whose loss or gradient was not finite
    wall_seconds: float  # of this process, inside `train`
    compile_seconds: float
    steps_per_second: float  # of training alone: no compilation, evaluation or saving
    examples_per_second: float


def train(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike,
    *,
    override_config: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Summary:
    """Trains a model, or goes on with the run that is in `workdir`.

    A run that is killed and started again ends with the parameters, bit for bit, of one
    that was not. A run that has ended is left as it is. The first SIGINT or SIGTERM
    saves a checkpoint and returns; the second raises KeyboardInterrupt.

    Args:
      config: A whole config.
      workdir: The run's folder.
      override_config: Whether to resume though the config is not the run's.
      devices: The devices that share the batch; None means all of this process.

    Returns:
      How it ended; also in summary.json.

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If the loss or its gradient stops being finite, more often
        in a row than the config allows.
      SaveError: If the last checkpoint cannot be written.
    """
    started = time.perf_counter()
    devices = list(devices or jax.devices())
    run_config.validate(config, num_devices=len(devices))
    placement = run_placement.make(config, devices)
    if config.training.tensorboard:
        metrics_log.check_tensorboard()
    folder = run_folder.open_folder(workdir)
    with lock.Lock(folder.lock):
        is_changed = _check_unchanged(folder, config, override_config)
        with checkpoints.Checkpoints(folder.checkpoints) as stored:
            finished = None if is_changed else _finished(folder, config, stored)
            if finished is not None:
                print(f"The run in {folder.root} has ended at step {finished.steps}.")
                return finished
            _check_steps(config, stored)
            summary = _run(config, folder, stored, placement)
        summary = summary._replace(wall_seconds=time.perf_counter() - started)
        run_folder.write_json(folder.summary, summary._asdict())
    return summary


def _run(config, folder, stored, placement) -> Summary:
    """Takes the steps that are left; `wall_seconds` is still to be filled in."""
    training = config.training
    task = run_config.make_task(config)
    run_config.validate_for_task(config, task)
    reports = metrics_log.read(folder.metrics)
    if reports and stored.latest() is None:
        _logger.warning(
            f"{folder.root} has reports up to step {reports[-1]['step']} and no "
            f"checkpoint: the run starts from the beginning."
        )
    before = time.perf_counter()
    model = run_folder.make_model(config, task, placement)
    state, programs = run_progress.prepare(config, task, model, stored, placement)
    compile_seconds = time.perf_counter() - before
    run_folder.write_config(folder, config, placement.devices)
    with (
        metrics_log.MetricsLog(
            folder.metrics,
            start=stored.latest() or 0,
            steps=training.steps,
            baseline=task.baseline,
            baseline_name=task.baseline_name,
            tensorboard=training.tensorboard,
        ) as log,
        interruption.Interruption() as interrupted,
    ):
        progress = run_progress.Progress(
            state, programs, training=training, stored=stored, log=log
        )
        start = progress.step
        log.say(_opening_line(config, progress, placement, compile_seconds))
        look = _looker(config, folder, model, task, start)
        look(progress)
        _take_steps(progress, training, interrupted, look)
        stored.close()  # while a signal still waits
        if interrupted.requested and progress.step < training.steps:
            kept = "is saved" if progress.step else "begins again"
            log.say(f"Interrupted at step {progress.step}, which {kept}.")
    rate = (progress.step - start) / progress.seconds if progress.seconds else 0.0
    return Summary(
        steps=progress.step,
        metrics=progress.metrics,
        baseline=dict(task.baseline),
        baseline_name=task.baseline_name,
        interrupted=progress.step < training.steps,
        resumed_from=start,
        skipped_steps=progress.skipped,
        wall_seconds=0.0,
        compile_seconds=compile_seconds,
        steps_per_second=rate,
        examples_per_second=rate * training.batch_size,
    )


def _take_steps(progress, training, interrupted, look) -> None:
    """Trains to the end or to an interruption; in both cases the last step is saved.

    What is due when depends on the step alone, so that a resumed run reports, evaluates
    and saves where an uninterrupted one does. Every checkpoint of these is evaluated.
    """
    saved = reported = progress.step

    def is_due(every):
        return progress.step % every == 0 or progress.step == training.steps

    while progress.step < training.steps and not interrupted.requested:
        progress.take_steps(_next_stop(progress, training))
        if training.timeline_every and is_due(training.timeline_every):
            look(progress)
        is_saved = is_due(training.checkpoint_every)
        is_evaluated = is_saved or is_due(training.evaluate_every)
        if is_evaluated or is_due(training.report_every):
            progress.report(is_evaluated=is_evaluated)
            reported = progress.step
        if is_saved:
            progress.save()
            saved = progress.step
    if progress.step != reported:
        progress.report(is_evaluated=False)
    if progress.step != saved:
        progress.save()
    if not progress.metrics and progress.step == training.steps:
        # Killed after its last report and before its summary.
        progress.evaluate()


def _looker(config, folder, model, task, start):
    """Returns what notes what the heads of a `Progress` do, if the config asks."""
    if not config.training.timeline_every:
        return lambda progress: None
    timeline = run_timeline.Timeline(
        folder.timeline, model=model, task=task, seed=config.seed, start=start
    )
    return lambda progress: timeline.record(progress.step, progress.params())


def _next_stop(progress, training) -> int:
    """Returns where the next dispatch ends: at most at the next report of any kind."""
    step = progress.step
    marks = (
        training.report_every,
        training.evaluate_every,
        training.checkpoint_every,
        training.timeline_every,
    )
    due = min((step // every + 1) * every for every in marks if every)
    most = min(training.steps_per_dispatch, progress.affordable_steps)
    return min(due, step + most, training.steps)


def _check_unchanged(folder, config, override) -> bool:
    """Returns whether the folder's run has another config; refuses that unless told."""
    saved = run_folder.read_config(folder)
    if saved is None:
        return False
    lines = run_config.difference(saved, run_config.to_json(config))
    if lines and not override:
        more = [f"and {len(lines) - 4} more"] if len(lines) > 4 else []
        raise ConfigError(
            f"The run in {folder.root} has another config: "
            f"{'; '.join(lines[:4] + more)}."
            "\nTake another workdir, or pass override_config to go on with this one."
        )
    return bool(lines)


def _finished(folder, config, stored) -> Summary | None:
    """Returns the summary of a run that has nothing left to do."""
    contents = run_folder.read_json(folder.summary)
    if contents is None or set(contents) != set(Summary._fields):
        return None
    summary = Summary(**contents)
    steps = config.training.steps
    is_whole = summary.steps == stored.latest() == steps and not summary.interrupted
    return summary if is_whole else None


def _check_steps(config, stored) -> None:
    taken = stored.latest() or 0
    if taken > config.training.steps:
        raise ConfigError(
            f"config.training.steps must be at least the {taken} steps that the run "
            f"has taken, got {config.training.steps}."
        )


def _opening_line(config, progress, placement, compile_seconds) -> str:
    num_params = sum(leaf.size for leaf in jax.tree.leaves(progress.params()))
    verb = f"resumes at step {progress.step}" if progress.step else "starts"
    count = len(placement.devices)
    return (
        f"{config.task.name} {verb}: {num_params:,} parameters, {count} "
        f"{placement.devices[0].platform} device{'s' * (count > 1)}, "
        f"compiled in {compile_seconds:.1f} s"
    )
