"""The output of a run: metrics.jsonl and TensorBoard, and a progress bar or lines."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from mha_haiku.core import fields
from mha_haiku.core.checks import ConfigError
from mha_haiku.training import stepping
from mha_haiku.training.runs import files, progress

_logger = logging.getLogger("mha_haiku")


class MetricsLog(files.LineWriter):
    """Writes the metrics of a run as they arrive.

    A line of metrics.jsonl is one report, its step and its metrics by name, or one
    event, which is a warning too; see `events_of_steps`. Lines of steps after `start`
    are dropped; up to there the run has trained `seconds`.
    """

    def __init__(
        self, path: Path, *, start: int, tensorboard: bool, seconds: float = 0.0
    ):
        super().__init__(path, last_step=start)
        self._opened = time.perf_counter() - seconds
        self._tensorboard = None
        if tensorboard:
            self._tensorboard = check_tensorboard().SummaryWriter(str(path.parent))

    def report(
        self, step: int, metrics: dict[str, Any], *, learning_rate: float
    ) -> None:
        seconds = round(time.perf_counter() - self._opened, 3)
        more = {"learning_rate": learning_rate, "seconds": seconds}
        self.append({"step": step, **metrics, **more})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)

    def event(self, event: dict[str, Any]) -> None:
        self.append(event)
        if event["event"] == "not_finite":
            said = (
                f"The {event['what']} is not finite at step {event['step']}: it is not "
                f"applied ({event['skipped']} such so far)."
            )
        else:
            said = (
                f"The loss jumped to {event['loss']:.4g} at step {event['step']}: "
                f"{event['deviations']:.1f} standard deviations above the mean of the "
                f"{stepping.WINDOW} steps before."
            )
        _logger.warning(said)

    def close(self) -> None:
        super().close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class Console(progress.Bar):
    """Shows the metrics of a run as they arrive.

    On a terminal a bar on stderr shows the progress, elsewhere a report prints a line
    on stdout with the time left. An evaluation always prints a line on stdout, with the
    task's baselines.
    """

    tell = staticmethod(progress.tell)

    def __init__(
        self, *, start: int, steps: int, baseline: dict[str, float], baseline_name: str
    ):
        super().__init__(steps, unit="step", start=start, leave=True, prints=False)
        self._baseline = baseline
        self._baseline_name = baseline_name

    def reach(self, step: int) -> None:
        self.update(step - self.n)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Shows a report; see `MetricsLog.report`."""
        self.reach(step)
        place = f"step {step:>{len(str(self.total))}}/{self.total}"
        rate = []
        if "examples_per_second" in metrics:
            rate = [f"{metrics['examples_per_second']:,.0f} examples/s"]
        if "loss" in metrics:
            shown = [f"loss {metrics['loss']:.4f}"]
            shown += [f"accuracy {metrics['accuracy']:.3f}", *rate]
            self.note(", ".join(shown))
            if not self.is_drawn:
                self.tell(f"{place}  {', '.join([*shown, self.times()])}")
        shown = []
        for name in ("exact_match", "accuracy", "loss"):
            if (value := metrics.get(f"held_out_{name}")) is not None:
                text = f"{name.replace('_', ' ')} {value:.4f}"
                if name in self._baseline:
                    text += f" ({self._baseline_name} {self._baseline[name]:.4f})"
                shown.append(text)
        if shown:
            self.tell(f"{place}  held-out {', '.join([*shown, *rate])}")


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the reports in metrics.jsonl, by step; see `files.read_lines`."""
    lines = [line for line in files.read_lines(path) if "event" not in line]
    try:
        for i, line in enumerate(lines, start=1):
            fields.decoded(dict[str, float | None], line, f"report {i}")
            fields.decoded(int, line.get("step"), f"report {i}.step")
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
    return lines


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """Takes the metrics out of a report in metrics.jsonl."""
    others = ("step", "learning_rate", "seconds")
    return {name: value for name, value in report.items() if name not in others}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events in metrics.jsonl; see `events_of_steps`."""
    return [line for line in files.read_lines(path) if "event" in line]


def events_of_steps(
    first: int, report: stepping.Report, skipped: int, *, least_rise: float
) -> list[dict[str, Any]]:
    """Lists the events of one dispatch, in order, as lines of metrics.jsonl.

    Event "not_finite" has "what" ("loss" or "gradient") and "skipped", the number of
    skipped steps so far; "loss_spike" has the "loss" and its "deviations" from the mean
    of the window, which it must also exceed by `least_rise` nats, as of
    `stepping.observe`. Before the dispatch `first` steps were taken, of which `skipped`
    were skipped.
    """
    events = []
    jumped = (report.deviations > stepping.SPIKE) & (report.rise > least_rise)
    for i in np.flatnonzero(~report.finite | jumped):
        event: dict[str, Any] = {"step": first + int(i) + 1}
        loss = float(report.sums.loss[i])
        if report.finite[i]:
            weight = float(report.sums.weight[i])
            event |= {"event": "loss_spike", "loss": loss / weight}
            event |= {"deviations": float(report.deviations[i])}
        else:
            skipped += 1
            what = "gradient" if math.isfinite(loss) else "loss"
            event |= {"event": "not_finite", "what": what, "skipped": skipped}
        events.append(event)
    return events


def check_tensorboard() -> Any:
    """Imports tensorboardX; raises ConfigError if it is not installed."""
    try:
        import tensorboardX
    except ImportError:
        raise ConfigError(
            "config.training.tensorboard needs the package tensorboardX: "
            "pip install tensorboardX installs it."
        ) from None
    return tensorboardX
