"""The training loop: when to take steps, report, evaluate, save and observe.

Between reports the host only starts dispatches of many steps; see `training.stepping`.
An `Observer` is called with the parameters.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from mha_haiku import checks, tasks
from mha_haiku.devices import cluster
from mha_haiku.runs import (
    configuration,
    files,
    folders,
    metrics_log,
    opening,
    progress,
    sharing,
    trainers,
    warm_start,
)

_logger = logging.getLogger("mha_haiku")


class Observer:
    """Is called with the parameters of a run while it trains; meant for subclasses too.

    Attributes:
      every: Steps between two calls of `look`; 0: none. It is also called before the
        first step and after the last, but at most once at each step.
    """

    def __init__(self, every: int, look: Callable[[int, Any], None] | None = None):
        """Takes the steps between calls, and a function of step and parameters."""
        self.every = checks.non_negative_integer("every", every)
        self._look = look

    def begin(
        self,
        folder: folders.Folder,
        config: ml_collections.ConfigDict,
        task: tasks.Task,
        step: int,
    ) -> None:
        """Is called before the first `look`, with the step at which the run starts."""

    def wants(self, step: int) -> bool:
        """Returns whether `look` is called at a step at which it could be.

        It must be the same in all processes.
        """
        del step
        return True

    def look(self, step: int, params: Any) -> None:
        """Is called on the first process, with host arrays."""
        if self._look is not None:
            self._look(step, params)

    def end(self) -> None:
        """Is called when the run ends, however it ends."""


def train(
    config: ml_collections.ConfigDict,
    workdir: str | os.PathLike,
    *,
    task: tasks.Task | None = None,
    override_config: bool = False,
    observers: Sequence[Observer] = (),
    devices: Sequence[jax.Device] | None = None,
) -> opening.Summary:
    """Trains a model, or resumes the run in `workdir`.

    A run that is killed and started again ends with the same parameters, bit for bit,
    as one that was not. A run that has ended stays as it is. The first SIGINT or
    SIGTERM saves a checkpoint and returns; the second raises KeyboardInterrupt.

    Args:
      config: A whole config.
      workdir: The run's folder.
      task: The task, in place of the one that `config.task` and `config.data` describe.
      override_config: Whether to resume even if the config, or the text that it names,
        differs from the run's.
      observers: Called with the parameters; with several processes the same on all.
      devices: The devices that divide the work; None: all devices of all processes.

    Returns:
      The summary, which is also in summary.json.

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If more steps in a row are nonfinite than the config allows.
      SaveError: If the last checkpoint cannot be written.
    """
    started = time.perf_counter()
    devices = list(devices or jax.devices())
    if task is not None:
        config = configuration.with_task(config, task)
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
            summary = _run(
                config, folder, stored, placement, observers, override_config
            )
        summary = summary._replace(wall_seconds=time.perf_counter() - started)
        if cluster.is_first():
            files.write_json(folder.summary, summary._asdict())
    return summary


def _run(
    config, folder, stored, placement, observers, override_config
) -> opening.Summary:
    """Takes the remaining steps; the summary's `wall_seconds` is left at 0."""
    training = config.training
    kept, source = None, None
    if stored.latest() is None and config.init_from:
        source = warm_start.load(config)
        kept = source.kept
    elif stored.latest() is not None:
        kept = folders.shared_kept(folder)
        if kept is not None and (override_config or stored.latest() == 0):
            kept = kept._replace(text=None)  # another text, in the same tokens
    task = configuration.make_task(config, kept)
    _ = task.train_data  # read now, so that errors in a text show before it compiles
    configuration.validate_for_task(config, task)
    is_first = cluster.is_first()
    reports = metrics_log.read(folder.metrics) if is_first else []
    if reports and stored.latest() is None:
        _logger.warning(
            f"{folder.root} has reports up to step {reports[-1]['step']} and no "
            f"checkpoint: the run starts from the beginning."
        )
    if is_first:
        progress.say(f"{task.name}: compiling")
    before = time.perf_counter()
    model = folders.make_model(config, task, placement)
    state, programs = trainers.prepare(config, task, model, stored, placement, source)
    compile_seconds = time.perf_counter() - before
    if is_first:
        folders.write_config(folder, config, placement.devices, task)
        start = stored.latest() or 0
        kept = [report for report in reports if report["step"] <= start]
        opened_log = metrics_log.MetricsLog(
            folder.metrics,
            start=start,
            seconds=kept[-1].get("seconds", 0.0) if kept else 0.0,
            steps=training.steps,
            baseline=task.baseline,
            baseline_name=task.baseline_name,
            tensorboard=training.tensorboard,
        )
    else:
        opened_log = metrics_log.Silent()
    with (
        opened_log as log,
        _Interruption() as interruption,
        contextlib.ExitStack() as stack,
    ):
        trainer = trainers.Trainer(
            state, programs, training=training, stored=stored, log=log
        )
        start = trainer.step
        log.say(_opening_line(config, trainer, placement, compile_seconds))
        if source is not None:
            log.say(str(source))
        observers = [observer for observer in observers if observer.every]
        for observer in observers if is_first else ():
            observer.begin(folder, config, task, start)
            stack.callback(observer.end)
        _look(trainer, observers)
        _take_steps(trainer, training, interruption, observers)
        stored.close()  # signals are still deferred here, so that saving completes
        if trainer.step < training.steps:
            kept = "is saved" if trainer.step else "begins again"
            log.say(f"Interrupted at step {trainer.step}, which {kept}.")
    rate = (trainer.step - start) / trainer.seconds if trainer.seconds else 0.0
    return opening.Summary(
        steps=trainer.step,
        metrics=trainer.metrics,
        baseline=dict(task.baseline),
        baseline_name=task.baseline_name,
        interrupted=trainer.step < training.steps,
        resumed_from=start,
        skipped_steps=trainer.skipped,
        wall_seconds=0.0,
        compile_seconds=compile_seconds,
        steps_per_second=rate,
        examples_per_second=rate * training.batch_size,
    )


def _take_steps(trainer, training, interruption, observers) -> None:
    """Trains to the end or to an interruption; in both cases the last step is saved.

    What is due depends only on the step, so that a resumed run reports, evaluates and
    saves at the same steps as an uninterrupted one. Every due checkpoint is evaluated.
    """
    saved = reported = trainer.step

    def is_due(every):
        return trainer.step % every == 0 or trainer.step == training.steps

    while trainer.step < training.steps:
        stops, steps = cluster.agree(
            interruption.is_requested, trainer.affordable_steps
        )
        if stops:
            break
        trainer.take_steps(_next_stop(trainer.step, steps, training, observers))
        is_saved = is_due(training.checkpoint_every)
        is_evaluated = is_saved or is_due(training.evaluate_every)
        if is_evaluated or is_due(training.report_every):
            trainer.report(is_evaluated=is_evaluated)
            reported = trainer.step
        _look(trainer, [each for each in observers if is_due(each.every)])
        if is_saved:
            trainer.save()
            saved = trainer.step
    if trainer.step != reported:
        trainer.report(is_evaluated=False)
    if trainer.step != saved:
        trainer.save()
    if not trainer.metrics and trainer.step == training.steps:
        # Killed after its last report and before its summary.
        trainer.evaluate()


def _look(trainer, observers) -> None:
    """Calls the observers with the parameters, on the first process."""
    observers = [each for each in observers if each.wants(trainer.step)]
    if observers:
        params = trainer.params()  # a collective: all processes must take part
        for observer in observers if cluster.is_first() else ():
            observer.look(trainer.step, params)


def _next_stop(step, most, training, observers) -> int:
    """Returns where the next dispatch ends: at most at the next report of any kind."""
    marks = (
        training.report_every,
        training.evaluate_every,
        training.checkpoint_every,
        *(observer.every for observer in observers),
    )
    due = min((step // every + 1) * every for every in marks)
    most = min(training.steps_per_dispatch, most)
    return min(due, step + most, training.steps)


def _opening_line(config, trainer, placement, compile_seconds) -> str:
    num_params = sum(leaf.size for leaf in jax.tree.leaves(trainer.params()))
    verb = f"resumes at step {trainer.step}" if trainer.step else "starts"
    count = len(placement.devices)
    return (
        f"{config.task.name} {verb}: {num_params:,} parameters, {count} "
        f"{placement.devices[0].platform} device{'s' * (count > 1)}, "
        f"compiled in {compile_seconds:.1f} s"
    )


class _Interruption:
    """While entered, notes the first SIGINT or SIGTERM in `is_requested`.

    The second raises KeyboardInterrupt. The former handlers are restored on
    leaving. Outside the main thread, where Python allows no handlers, nothing changes.
    """

    def __init__(self):
        self.is_requested = False
        self._before = {}

    def __enter__(self) -> "_Interruption":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back.
            if handler is not None:
                signal.signal(number, handler)
        self._before = {}

    def _handle(self, number, frame) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
