"""The training loop: when to take steps, report, evaluate, save and observe.

Between reports the host only starts dispatches of many steps; see `training.stepping`.
An `Observer` is called with the parameters.
"""

import contextlib
import copy
import logging
import os
import signal
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mha_haiku.core import checks
from mha_haiku.training import tasks
from mha_haiku.training.devices import Placement, cluster
from mha_haiku.training.runs import (
    configuration,
    files,
    folders,
    metrics_log,
    progress,
    starting,
    trainers,
)

_logger = logging.getLogger("mha_haiku")


class Observer:
    """Receives the parameters during training. Pass a callback, or subclass it.

    `look`, or the callback instead, is called every `every` steps (0: never), before
    the first step and after the last. Runs that train together have separate copies of
    the observer, made before `begin`.

    Raises:
      ValueError: If `every` is not an integer of at least 0.

    Example:
      >>> config = mh.runs.default_config("reverse").replace(training=dict(steps=4))
      >>> steps = []
      >>> observer = mh.runs.Observer(2, lambda step, params: steps.append(step))
      >>> summary = mh.runs.train(config, "runs/tiny", observers=[observer])
      reverse starts: ...
      >>> steps
      [0, 2, 4]
    """

    def __init__(self, every: int, look: Callable[[int, Any], None] | None = None):
        self.every = checks.non_negative_integer("every", every)
        self._look = look

    def begin(
        self,
        folder: folders.Folder,
        config: configuration.RunConfig,
        task: tasks.Task,
        step: int,
    ) -> None:
        """Called before the first `look`, with the step at which the run starts."""

    def wants(self, step: int) -> bool:
        """Returns whether `look` is called at a due step; the same in all processes."""
        return True

    def look(self, step: int, params: Any) -> None:
        """Called on the first process, with host arrays."""
        if self._look is not None:
            self._look(step, params)

    def end(self) -> None:
        """Called when the run ends, however it ends."""


def train(
    config: configuration.RunConfig,
    workdir: str | os.PathLike,
    *,
    task: tasks.Task | None = None,
    override_config: bool = False,
    observers: Sequence[Observer] = (),
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> starting.Summary | starting.SeedsSummary:
    """Trains a model, or resumes the run in `workdir`; returns its summary.json.

    With several `config.training.seeds` it trains as many models in one program, in
    folders `seed_0` and so on. A model that fails does not stop the others.

    A run that is killed and started again ends with the same parameters, bit for bit,
    as one that was not. A run that has ended is not changed. The first SIGINT or
    SIGTERM saves a checkpoint and returns; the second raises KeyboardInterrupt.

    Args:
      config: A complete config.
      workdir: The run's folder.
      task: The task, instead of the one that `config.task` and `config.data` describe.
      override_config: Whether to resume even if the config, or the text that it names,
        differs from the run's.
      observers: Observers of the run; the same on all processes.
      devices: The devices that divide the work. Defaults to all of all processes.

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If more steps in a row are nonfinite than the config
        allows, in all runs.
      SaveError: If the last checkpoint cannot be written.

    Example:
      >>> config = mh.runs.default_config("reverse").replace(training=dict(steps=4))
      >>> summary = mh.runs.train(config, "runs/tiny")
      reverse starts: ...
      >>> summary.steps, mh.runs.load_run("runs/tiny").step
      (4, 4)
    """
    started = time.perf_counter()
    devices = list(devices or jax.devices())
    if task is not None:
        config = configuration.with_task(config, task)
    if config.training.tensorboard:
        metrics_log.check_tensorboard()
    with contextlib.ExitStack() as stack:
        opened = starting.open_runs(
            stack, config, workdir, override_config=override_config
        )
        root = folders.Folder(checks.as_path(workdir))
        ended = {run.config.seed: run.finished for run in opened if run.finished}
        if len(ended) == len(opened):
            summary = starting.whole(ended, {})
            if cluster.is_first():
                print(f"The run in {root.root} has ended at step {summary.steps}.")
            return summary
        placement = configuration.make_placement(config, devices)
        kept = None if task is None else task.keep()
        made = _make_task(config, opened, kept, override_config)
        return _run(config, root, opened, placement, observers, *made, started)


def train_whole(
    config: configuration.RunConfig, workdir: str | os.PathLike, **options: Any
) -> starting.Summary | starting.SeedsSummary:
    """Trains as `train` does, for callers that need a run that has ended.

    Raises:
      KeyboardInterrupt: If training is interrupted; the same call resumes it.
    """
    summary = train(config, workdir, **options)
    if summary.interrupted:
        raise KeyboardInterrupt
    return summary


class Trained(NamedTuple):
    """A run that has ended.

    Example:
      >>> config = mh.runs.default_config("reverse").replace(training=dict(steps=4))
      >>> trained = mh.runs.train_seeds(config, 2)
      reverse starts: 2 models...
      >>> [(each.seed, each.run.step) for each in trained]
      [(0, 4), (1, 4)]
    """

    seed: int  # its `config.seed`
    run: folders.Run  # with the parameters of its last step
    reports: list[dict[str, Any]]  # by step; see `MetricsLog.report`


def train_seeds(
    config: configuration.RunConfig,
    seeds: int,
    workdir: str | os.PathLike | None = None,
    **options: Any,
) -> list[Trained]:
    """Trains a config with `seeds` seeds, from `config.seed` on, in one program.

    Options are as for `train`; without a `workdir` the runs are in a temporary folder,
    which is removed. The runs share one model and one task, and so all compiled
    programs.

    Raises:
      ValueError: If `seeds` is not an integer above 0; and what `train` raises.
      KeyboardInterrupt: If training is interrupted; in a `workdir` it is resumed.
      NonFiniteLossError: If a run failed; the others are in `workdir`.

    Example:
      >>> config = mh.runs.default_config("reverse").replace(training=dict(steps=4))
      >>> one, other = mh.runs.train_seeds(config, 2)
      reverse starts: 2 models...
      >>> one.seed, other.seed
      (0, 1)
    """
    seeds = checks.positive_integer("seeds", seeds)
    config = config.replace(training=dict(seeds=seeds))
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = stack.enter_context(tempfile.TemporaryDirectory())
        summary = train_whole(config, workdir, **options)
        root = folders.Folder(checks.as_path(workdir))
        failed = summary.failed if isinstance(summary, starting.SeedsSummary) else {}
        if failed:
            raise trainers.NonFiniteLossError(
                "\n".join(f"Seed {seed}: {why}" for seed, why in failed.items())
            )
        trained = [
            Trained(
                run_config.seed,
                folders.load_run(folder.root),
                metrics_log.read(folder.metrics),
            )
            for run_config, folder in folders.of_runs(root, config)
        ]
    shared = dict(model=trained[0].run.model, task=trained[0].run.task)
    return [result._replace(run=result.run._replace(**shared)) for result in trained]


def _make_task(
    config: configuration.RunConfig,
    opened: Sequence[starting.Opened],
    given: tasks.Kept | None,
    override_config: bool,
) -> tuple[tasks.Task, starting.Start | None]:
    """Makes the task from the runs' data, and loads the run that they start from."""
    begun = [run for run in opened if run.stored.latest() is not None]
    kept, source = None, None
    if config.init_from and len(begun) < len(opened):
        source = starting.load_start(config)
        kept = source.kept
    if begun:
        kept = folders.shared_kept(begun[0].folder)
        if kept is not None and (override_config or begun[0].stored.latest() == 0):
            kept = kept._replace(text=None)  # another text, in the same tokens
    if given is not None and given.arrays is not None:
        if kept is not None and kept.tokenizer != given.tokenizer:
            raise checks.ConfigError(
                "The examples and the run that they would train have different tokens "
                "or labels; give examples with the same ones, or another workdir."
            )
        kept = given
    task = configuration.make_task(config, kept)
    _ = task.train_data  # read now, so that errors in a text show before it compiles
    configuration.validate_for_task(config, task)
    return task, source


def _run(
    config: configuration.RunConfig,
    root: folders.Folder,
    opened: Sequence[starting.Opened],
    placement: Placement,
    observers: Sequence[Observer],
    task: tasks.Task,
    source: starting.Start | None,
    started: float,
) -> starting.Summary | starting.SeedsSummary:
    steps, is_first = config.training.steps, cluster.is_first()
    compiling = f"{task.name}: compiling"
    with progress.during(compiling) if is_first else contextlib.nullcontext():
        trainer = trainers.Trainer(opened, task, placement, source)
    with (
        contextlib.ExitStack() as stack,
        _interruption() as is_requested,
        contextlib.ExitStack() as watching,
    ):
        if is_first:
            if len(opened) > 1:
                folders.write_config(root, config, placement.devices, task)
            for model in trainer.models:
                name = f"seed {model.seed}" if len(opened) > 1 else ""
                model.log = stack.enter_context(_open_log(model.run, name, trainer))
            trainer.console = stack.enter_context(
                metrics_log.Console(
                    start=min(run.stored.latest() or 0 for run in opened),
                    steps=steps,
                    baseline=task.baseline,
                    baseline_name=task.baseline_name,
                )
            )
        console = trainer.console
        console.tell(_opening_line(trainer))
        warmup_steps = config.optimizer.warmup_steps
        if warmup_steps > steps:
            console.tell(
                f"config.optimizer.warmup_steps is {warmup_steps}: the learning rate "
                f"rises in all of the {steps} steps."
            )
        if source is not None:
            console.tell(str(source))
        observers = [observer for observer in observers if observer.every]
        for i, model in enumerate(trainer.models):
            model.observers = [copy.copy(x) if i else x for x in observers]
            for observer in model.observers if is_first else ():
                observer.begin(model.run.folder, model.run.config, task, model.start)
                watching.callback(observer.end)
        _look(trainer)  # those that are due compile here
        console.start_clock()
        _take_steps(trainer, is_requested)
        # Signals are still deferred here, so that saving completes.
        for each in opened:
            each.stored.close()
        if trainer.step < steps:
            kept = "is saved" if trainer.step else "begins again"
            console.tell(f"Interrupted at step {trainer.step}, which {kept}.")
    summaries, failed = {}, {x.seed: x.failure for x in trainer.models if x.failure}
    for model in trainer.models:
        if model.failure:
            continue
        own = model.run.finished or _summary(model, trainer, started)
        summaries[model.seed] = own
        if is_first and model.run.finished is None:
            files.write_json(model.run.folder.summary, own._asdict())
    summary = starting.whole(summaries, failed)
    if is_first and len(opened) > 1:
        files.write_json(root.summary, summary._asdict())
    return summary


def _open_log(
    opened: starting.Opened, name: str, trainer: trainers.Trainer
) -> metrics_log.MetricsLog:
    """Writes the config of a run, unless it has ended, and returns its open log."""
    folder, latest = opened.folder, opened.stored.latest()
    if opened.finished is None:
        used = trainer.placement.devices
        folders.write_config(folder, opened.config, used, trainer.task)
    reports = metrics_log.read(folder.metrics)
    if reports and latest is None:
        _logger.warning(
            f"{folder.root} has reports up to step {reports[-1]['step']} and no "
            f"checkpoint: the run starts from the beginning."
        )
    start = latest or 0
    kept = [report for report in reports if report["step"] <= start]
    return metrics_log.MetricsLog(
        folder.metrics,
        start=start,
        seconds=kept[-1].get("seconds", 0.0) if kept else 0.0,
        tensorboard=opened.config.training.tensorboard,
        name=name,
    )


def _summary(
    model: trainers.Trainee, trainer: trainers.Trainer, started: float
) -> starting.Summary:
    training = trainer.config.training
    taken = model.step - model.start
    rate = taken / trainer.seconds if trainer.seconds else 0.0
    return starting.Summary(
        steps=model.step,
        metrics=model.metrics,
        baseline=dict(trainer.task.baseline),
        baseline_name=trainer.task.baseline_name,
        interrupted=model.step < training.steps,
        resumed_from=model.start,
        skipped_steps=model.skipped,
        wall_seconds=time.perf_counter() - started,
        compile_seconds=trainer.compile_seconds,
        steps_per_second=rate,
        examples_per_second=rate * training.batch_size,
    )


def _take_steps(trainer: trainers.Trainer, is_requested: list[int]) -> None:
    """Trains to the end or to an interruption; in both cases the last step is saved."""
    saved, training = trainer.step, trainer.config.training

    def is_due(every: int) -> bool:
        return _is_due(trainer.step, every, training)

    while trainer.step < training.steps:
        stops, steps = cluster.agree(bool(is_requested), trainer.affordable_steps)
        if stops:
            break
        trainer.take_steps(_next_stop(trainer, steps))
        is_saved = is_due(training.checkpoint_every)
        is_evaluated = is_saved or is_due(training.evaluate_every)
        if is_evaluated or is_due(training.report_every):
            trainer.report(is_evaluated=is_evaluated)
        _look(trainer)
        if is_saved:
            trainer.save()
            saved = trainer.step
    if trainer.step != saved:
        trainer.save()
    if trainer.step == training.steps:
        trainer.complete()  # killed after its last report and before its summary


def _is_due(step: int, every: int, training: configuration.TrainingConfig) -> bool:
    """Checks whether an action of `every` steps is due; always at first and last steps.

    It depends only on the step, so that a resumed run reports, evaluates, saves and
    observes at the same steps as an uninterrupted one.
    """
    return step % every == 0 or step == training.steps


def _look(trainer: trainers.Trainer) -> None:
    """Calls the observers of the models that moved, on the first process."""
    training = trainer.config.training
    looks = {
        model.seed: [
            x
            for x in model.observers
            if _is_due(model.step, x.every, training) and x.wants(model.step)
        ]
        for model in trainer.moved
    }
    if any(looks.values()):
        # A collective: all processes must take part.
        for model, params in trainer.of_moved(trainer.state.params):
            for observer in looks[model.seed] if cluster.is_first() else ():
                observer.look(model.step, params)


def _next_stop(trainer: trainers.Trainer, most: int) -> int:
    """Finds where the next dispatch ends: at most at the next report of any kind."""
    training = trainer.config.training
    marks = (
        training.report_every,
        training.evaluate_every,
        training.checkpoint_every,
        *(observer.every for model in trainer.models for observer in model.observers),
    )
    step, most = trainer.step, min(training.steps_per_dispatch, most)
    due = min((step // every + 1) * every for every in marks)
    return min(due, step + most, training.steps)


def _opening_line(trainer: trainers.Trainer) -> str:
    (_, params), *others = trainer.of_moved(trainer.state.params)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    verb = f"resumes at step {trainer.step}" if trainer.step else "starts"
    used = trainer.placement.devices
    models = f"{len(others) + 1} models of " if others else ""
    return (
        f"{trainer.config.task.name} {verb}: {models}{num_params:,} parameters, "
        f"{len(used)} {used[0].platform} device{'s' * (len(used) > 1)}, "
        f"compiled in {trainer.compile_seconds:.1f} s"
    )


@contextlib.contextmanager
def _interruption() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM; the second raises KeyboardInterrupt."""
    received, before = [], {}

    def handle(number: int, frame: types.FrameType | None):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        # Elsewhere Python allows no handlers, and nothing changes.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, handle)
        yield received
    finally:
        for number, handler in before.items():
            # None: the handler was not installed from Python and cannot be put back.
            if handler is not None:
                signal.signal(number, handler)
