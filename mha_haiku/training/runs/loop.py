"""The training loop: when to take steps, report, evaluate, save and observe.

Between reports the host only starts dispatches of many steps; see `train_step`.
The first process reads the folder (`_read`) and writes it (`_Record`); the others
receive what it has read, and take the same steps.
"""

import contextlib
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax

from mha_haiku.core import checks, models
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import tasks
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import (
    checkpoints,
    configuration,
    files,
    folders,
    metrics_log,
    progress,
    trainers,
)


class Summary(NamedTuple):
    """The end of a run: the content of summary.json."""

    steps: int  # taken in all
    metrics: dict[str, float]  # of the last report
    baseline: dict[str, float]  # of the best answer without the input
    baseline_name: str
    interrupted: bool  # by SIGINT or SIGTERM, before the last step
    resumed_from: int  # the step this process started at
    wall_seconds: float  # of this process, inside `train`
    compile_seconds: float
    steps_per_second: float  # of training only: no compilation, evaluation or saving
    examples_per_second: float


class Observer:
    """Receives the parameters during training. Pass a callback, or subclass it.

    `look`, or the callback instead, is called every `every` steps (0: never), before
    the first step and after the last.
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
    model: models.Model | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Summary:
    """Trains a model, or resumes the run in `workdir`; returns its summary.json.

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
      model: The model of a folder from `folders.write_run`, not `config.model`.
      optimizer: The optimizer of a config whose `optimizer.name` is "optax".

    Raises:
      ConfigError: If the config, the folder or both together are not usable.
      NonFiniteLossError: If a loss or a gradient is not finite.
      SaveError: If a file of the run cannot be written.

    Example:
      >>> config = mh.runs.default_config("reverse").replace(training=dict(steps=4))
      >>> steps = []
      >>> observer = mh.runs.Observer(2, lambda step, params: steps.append(step))
      >>> summary = mh.runs.train(config, "runs/tiny", observers=[observer])
      reverse starts: ...
      >>> summary.steps, steps
      (4, [0, 2, 4])
    """
    started = time.perf_counter()
    devices = list(devices or jax.devices())
    if task is not None:
        config = configuration.with_task(config, task)
    config = configuration.with_absolute_paths(config)
    kept = None if task is None else task.keep()
    folder = folders.Folder(checks.as_path(workdir))
    with contextlib.ExitStack() as stack:
        content = cluster.first_does(
            lambda: _read(stack, folder, config, override=override_config, kept=kept)
        )
        lines = configuration.difference(content["config"], config.to_json())
        if cluster.agree(bool(lines), 0)[0]:
            details = "; ".join(lines[:4]) or "another has a different one"
            raise ConfigError(f"All processes must have the same config: {details}.")
        if content["summary"] is not None:
            return Summary(**content["summary"])
        placement = configuration.make_placement(config, devices)
        task = _make_task(config, content, kept, override_config)
        if model is None:
            configuration.validate_for_task(config, task)
        progress.say(f"{task.name}: compiling")
        parts: Any = {"model": model, "optimizer": optimizer}
        parts["arrays"] = content["arrays"]
        trainer = trainers.Trainer(config, task, placement, **parts)
        # Signals are deferred until all is saved.
        is_requested = stack.enter_context(_interruption())
        observers = [observer for observer in observers if observer.every]
        start, record = trainer.step, _Silent()
        if cluster.is_first():
            record = _Record(stack, folder, trainer, observers, content["report"])
        _look(trainer, record, observers)  # those that are due compile here
        record.start_clock()
        metrics = metrics_log.metrics_of(content["report"])
        metrics = _take_steps(
            trainer, record, observers, metrics, content["step"], is_requested
        )
        rate = (trainer.step - start) / trainer.seconds if trainer.seconds else 0.0
        summary = Summary(
            steps=trainer.step,
            metrics=metrics,
            baseline=dict(task.baseline),
            baseline_name=task.baseline_name,
            interrupted=trainer.step < config.training.steps,
            resumed_from=start,
            wall_seconds=time.perf_counter() - started,
            compile_seconds=trainer.compile_seconds,
            steps_per_second=rate,
            examples_per_second=rate * config.training.batch_size,
        )
        record.end(summary)
        return summary


def _read(
    stack: contextlib.ExitStack,
    folder: folders.Folder,
    config: configuration.RunConfig,
    *,
    override: bool,
    kept: tasks.Kept | None,
) -> dict[str, Any]:
    """Locks the folder until the stack closes; reads what is needed to train in it.

    ConfigError if the config does not fit what is there.
    """
    saved, steps = stack.enter_context(folders.held(folder)), config.training.steps
    newest, is_changed = checkpoints.newest(folder.checkpoints), False
    latest = newest and newest.step
    if saved is not None:
        is_changed = _is_changed(folder, saved, config, override, latest)
    content: dict[str, Any] = {"config": config.to_json(), "step": latest}
    content |= dict.fromkeys(["summary", "arrays", "kept"]) | {"report": {}}
    ended = files.read_json(folder.summary)
    if ended and not is_changed and set(ended) == set(Summary._fields):
        if ended["steps"] == latest == steps and not ended["interrupted"]:
            print(f"The run in {folder.root} has ended at step {steps}.")
            return content | {"summary": ended}
    if newest is None:
        return content
    if newest.step > steps:
        raise ConfigError(
            f"config.training.steps must be at least the {latest} steps that the "
            f"run has taken, got {steps}."
        )
    reports = metrics_log.read(folder.metrics)
    before = [report for report in reports if report["step"] <= newest.step]
    is_replaced = override and kept is not None and kept.arrays is not None
    return content | {
        "arrays": newest.arrays(),
        "report": before[-1] if before else {},
        "kept": folders.read_kept(folder, with_data=not is_replaced),
    }


def _is_changed(
    folder: folders.Folder,
    saved: configuration.RunConfig,
    config: configuration.RunConfig,
    override: bool,
    latest: int | None,
) -> bool:
    """Checks whether the run's config differs; refuses that without `override`."""
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


def _make_task(
    config: configuration.RunConfig,
    content: dict[str, Any],
    passed: tasks.Kept | None,
    override_config: bool,
) -> tasks.Task:
    """Makes the task from the run's data, or from data that was passed."""
    kept = None
    if content["kept"] is not None:
        kept = tasks.Kept(**content["kept"])
        if override_config or content["step"] == 0:
            kept = kept._replace(text=None)  # another text, in the same tokens
    if passed is not None and passed.arrays is not None:
        if kept is not None and kept.tokenizer != passed.tokenizer:
            raise ConfigError(
                "The examples and the run that they would train have different tokens "
                "or labels; give examples with the same ones, or another workdir."
            )
        kept = passed
    task = configuration.make_task(config, kept)
    _ = task.train_data  # read now, so that errors in a text show before it compiles
    return task


class _Record:
    """Writes and shows a run in training, in the first process only."""

    tell = staticmethod(progress.tell)

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: folders.Folder,
        trainer: trainers.Trainer,
        observers: Sequence[Observer],
        report: dict[str, Any],
    ):
        self._folder, self._trainer = folder, trainer
        config, task, used = trainer.config, trainer.task, trainer.placement.devices
        folders.write_config(folder, config, used, task)
        self._log = stack.enter_context(
            files.LineWriter(folder.metrics, last_step=trainer.step)
        )
        self._began = time.perf_counter() - report.get("seconds", 0.0)
        self._start, self._clock = trainer.step, time.perf_counter()
        self.tell(
            f"{config.task.name} "
            f"{f'resumes at step {trainer.step}' if trainer.step else 'starts'}: "
            f"{trainer.num_params:,} parameters, {len(used)} {used[0].platform} "
            f"device{'s' * (len(used) > 1)}, compiled in "
            f"{trainer.compile_seconds:.1f} s"
        )
        for observer in observers:
            observer.begin(folder, config, task, trainer.step)
            stack.callback(observer.end)

    def start_clock(self) -> None:
        """Lets the time left not count what was compiled before."""
        self._clock = time.perf_counter()

    def report(self, metrics: dict[str, float]) -> None:
        step, rate = self._trainer.step, self._trainer.learning_rate()
        now, steps = time.perf_counter(), self._trainer.config.training.steps
        more = {} if rate is None else {"learning_rate": rate}
        more["seconds"] = round(now - self._began, 3)
        self._log.append({"step": step, **metrics, **more})
        share = (step - self._start) / (steps - self._start)
        task = self._trainer.task
        for line in metrics_log.lines_of(
            metrics,
            times=progress.times(now - self._clock, share),
            baseline=task.baseline,
            baseline_name=task.baseline_name,
        ):
            self.tell(f"step {step:>{len(str(steps))}}/{steps}  {line}")

    def look(self, observers: Sequence[Observer], params: Any) -> None:
        for observer in observers:
            observer.look(self._trainer.step, params)

    def save(self, state: Any, held_out_loss: float | None) -> None:
        self._log.sync()  # the metrics of a summary, if a kill comes before it
        checkpoints.save(
            self._folder.checkpoints,
            self._trainer.step,
            state,
            held_out_loss=held_out_loss,
        )

    def end(self, summary: Summary) -> None:
        files.write_json(self._folder.summary, summary._asdict())


class _Silent:
    """The record on processes other than the first."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _take_steps(
    trainer: trainers.Trainer,
    record: Any,
    observers: Sequence[Observer],
    metrics: dict[str, float],
    saved: int | None,
    is_requested: list[int],
) -> dict[str, float]:
    """Trains to the end or to an interruption; in both cases the last step is saved.

    `metrics` are of the last report, and `saved` is the step of the newest checkpoint.
    Returns the metrics of the last report.
    """
    training = trainer.config.training

    def is_due(every: int) -> bool:
        return _is_due(trainer.step, every, training)

    def check_finite() -> None:
        if trainer.failure:
            raise trainers.NonFiniteLossError(
                f"{trainer.failure}; the last checkpoint is of step {saved}. A smaller "
                "config.optimizer.learning_rate or clip_norm, or more warmup_steps, "
                "may help."
            )

    def save() -> int:
        loss = None if trainer.window else metrics.get("held_out_loss")
        record.save(trainer.placement.fetch(trainer.state), loss)
        return trainer.step

    while trainer.step < training.steps:
        stops, most = cluster.agree(bool(is_requested), trainer.affordable_steps)
        if stops:
            break
        trainer.take_steps(_next_stop(trainer, observers, most))
        check_finite()
        is_saved = is_due(training.checkpoint_every)
        is_evaluated = is_saved or is_due(training.evaluate_every)
        if is_evaluated or is_due(training.report_every):
            metrics = trainer.report(is_evaluated=is_evaluated)
            check_finite()
            record.report(metrics)
        _look(trainer, record, observers)
        if is_saved:
            saved = save()
    if trainer.step != (saved or 0):
        save()
    if trainer.step < training.steps:
        kept = "is saved" if trainer.step else "begins again"
        record.tell(f"Interrupted at step {trainer.step}, which {kept}.")
    return metrics


def _look(
    trainer: trainers.Trainer, record: Any, observers: Sequence[Observer]
) -> None:
    """Calls the observers that are due, on the first process."""
    step, training = trainer.step, trainer.config.training
    due = [x for x in observers if _is_due(step, x.every, training)]
    if due:  # a collective: all processes must take part
        record.look(due, trainer.placement.fetch(trainer.state.params))


def _next_stop(
    trainer: trainers.Trainer, observers: Sequence[Observer], most: int
) -> int:
    """Finds where the next dispatch ends: at most at the next report of any kind."""
    training = trainer.config.training
    marks = (
        training.report_every,
        training.evaluate_every,
        training.checkpoint_every,
        *(observer.every for observer in observers),
    )
    step, most = trainer.step, min(training.steps_per_dispatch, most)
    due = min((step // every + 1) * every for every in marks)
    return min(due, step + most, training.steps)


def _is_due(step: int, every: int, training: configuration.TrainingConfig) -> bool:
    """Checks whether an action of `every` steps is due; always at first and last steps.

    It depends only on the step, so that a resumed run reports, evaluates, saves and
    observes at the same steps as an uninterrupted one.
    """
    return step % every == 0 or step == training.steps


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
