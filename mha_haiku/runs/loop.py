"""The training loop, which owns a run's input and output.

Between reports nothing happens on the host but a dispatch of many steps; see `step.py`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from mha_haiku import tasks
from mha_haiku.devices import cluster
from mha_haiku.runs import (
    configuration,
    files,
    folders,
    interruption,
    metrics_log,
    opening,
    sharing,
    trainer,
)

_logger = logging.getLogger("mha_haiku")

# From a run's folder, its config, its task and the step it starts at to what looks at
# its parameters: called with the step and the parameters, on the first process.
MakeObserver = Callable[
    [folders.Folder, ml_collections.ConfigDict, tasks.Task, int],
    Callable[[int, Any], None],
]


def train(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike,
    *,
    override_config: bool = False,
    make_observer: MakeObserver | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> opening.Summary:
    """Trains a model, or goes on with the run that is in `workdir`.

    A run that is killed and started again ends with the parameters, bit for bit, of one
    that was not. A run that has ended is left as it is. The first SIGINT or SIGTERM
    saves a checkpoint and returns; the second raises KeyboardInterrupt.

    Args:
      config: A whole config.
      workdir: The run's folder.
      override_config: Whether to resume though the config is not the run's.
      make_observer: Makes what looks at the parameters every
        `config.training.timeline_every` steps; None: nothing does.
      devices: The devices that share the work; None means all of all processes.

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
    opening.check_same(config)
    configuration.validate(config, num_devices=len(devices))
    placement = sharing.make(config, devices)
    if config.training.tensorboard:
        metrics_log.check_tensorboard()
    with contextlib.ExitStack() as stack:
        folder, stored, finished = opening.open_run(
            stack, config, workdir, override_config=override_config
        )
        if finished is not None:
            return finished
        with stored:
            summary = _run(config, folder, stored, placement, make_observer)
        summary = summary._replace(wall_seconds=time.perf_counter() - started)
        if cluster.is_first():
            files.write_json(folder.summary, summary._asdict())
    return summary


def _run(config, folder, stored, placement, make_observer) -> opening.Summary:
    """Takes the steps that are left; `wall_seconds` is still to be filled in."""
    training = config.training
    task = configuration.make_task(config)
    configuration.validate_for_task(config, task)
    is_first = cluster.is_first()
    reports = metrics_log.read(folder.metrics) if is_first else []
    if reports and stored.latest() is None:
        _logger.warning(
            f"{folder.root} has reports up to step {reports[-1]['step']} and no "
            f"checkpoint: the run starts from the beginning."
        )
    before = time.perf_counter()
    model = folders.make_model(config, task, placement)
    state, programs = trainer.prepare(config, task, model, stored, placement)
    compile_seconds = time.perf_counter() - before
    if is_first:
        folders.write_config(folder, config, placement.devices)
        opened_log = metrics_log.MetricsLog(
            folder.metrics,
            start=stored.latest() or 0,
            steps=training.steps,
            baseline=task.baseline,
            baseline_name=task.baseline_name,
            tensorboard=training.tensorboard,
        )
    else:
        opened_log = metrics_log.Silent()
    with opened_log as log, interruption.Interruption() as interrupted:
        progress = trainer.Progress(
            state, programs, training=training, stored=stored, log=log
        )
        start = progress.step
        log.say(_opening_line(config, progress, placement, compile_seconds))
        look = _looker(config, folder, task, start, make_observer)
        look(progress)
        _take_steps(progress, training, interrupted, look)
        stored.close()  # while a signal still waits
        if progress.step < training.steps:
            kept = "is saved" if progress.step else "begins again"
            log.say(f"Interrupted at step {progress.step}, which {kept}.")
    rate = (progress.step - start) / progress.seconds if progress.seconds else 0.0
    return opening.Summary(
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

    while progress.step < training.steps:
        stops, steps = cluster.agree(interrupted.requested, progress.affordable_steps)
        if stops:
            break
        progress.take_steps(_next_stop(progress.step, steps, training))
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


def _looker(config, folder, task, start, make_observer):
    """Returns what notes what the heads of a `Progress` do, if the config asks."""
    if not config.training.timeline_every or make_observer is None:
        return lambda progress: None
    if not cluster.is_first():
        return lambda progress: progress.params()  # which all processes gather
    observe = make_observer(folder, config, task, start)
    return lambda progress: observe(progress.step, progress.params())


def _next_stop(step, most, training) -> int:
    """Returns where the next dispatch ends: at most at the next report of any kind."""
    marks = (
        training.report_every,
        training.evaluate_every,
        training.checkpoint_every,
        training.timeline_every,
    )
    due = min((step // every + 1) * every for every in marks if every)
    most = min(training.steps_per_dispatch, most)
    return min(due, step + most, training.steps)


def _opening_line(config, progress, placement, compile_seconds) -> str:
    num_params = sum(leaf.size for leaf in jax.tree.leaves(progress.params()))
    verb = f"resumes at step {progress.step}" if progress.step else "starts"
    count = len(placement.devices)
    return (
        f"{config.task.name} {verb}: {num_params:,} parameters, {count} "
        f"{placement.devices[0].platform} device{'s' * (count > 1)}, "
        f"compiled in {compile_seconds:.1f} s"
    )
