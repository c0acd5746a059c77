"""What a run says while it runs: metrics.jsonl, a bar or plain lines, TensorBoard."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from mha_haiku.checks import ConfigError
from mha_haiku.runs import events

_logger = logging.getLogger("mha_haiku")


class MetricsLog:
    """Writes the metrics of a run as they come.

    A line of metrics.jsonl is one report, its step and its metrics by name, or one
    event; see `events`. Lines that a full disk refuses are written when it has room. On
    a terminal a bar on stderr shows the progress; everywhere each evaluation prints a
    line on stdout, and an event a warning.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int,
        steps: int,
        baseline: dict[str, float],
        baseline_name: str,
        tensorboard: bool,
    ):
        """Opens the log; call it when compilation is over, as the bar's clock starts.

        Args:
          path: metrics.jsonl. Lines of steps after `start` are dropped from it.
          start: The step the run starts or resumes from.
          steps: The step it ends at.
          baseline: "accuracy" and "loss" of the best answer that ignores the input.
          baseline_name: What that is called.
          tensorboard: Whether to write TensorBoard's files beside metrics.jsonl.

        Raises:
          ConfigError: If TensorBoard is asked for and tensorboardX is not installed.
        """
        import tqdm

        _drop_after(path, start)
        self._file = path.open("ab", buffering=0)
        self._pending = b""  # what could not be written yet
        self._steps = steps
        self._baseline = baseline
        self._baseline_name = baseline_name
        self._tensorboard = _open_tensorboard(path.parent) if tensorboard else None
        self._bar = tqdm.tqdm(
            total=steps,
            initial=start,
            unit="step",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def advance(self, step: int) -> None:
        """Moves the bar to a step."""
        self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes one report, at once.

        Args:
          step: The steps taken.
          metrics: Numbers by name; with `held_out_loss` and `held_out_accuracy` when
            this report has an evaluation.
        """
        self._write({"step": step, **metrics})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        self.advance(step)
        if "loss" in metrics:
            self._bar.set_postfix_str(
                f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}, "
                f"{metrics['examples_per_second']:,.0f} examples/s"
            )
        if "held_out_loss" in metrics:
            self.say(self._evaluation_line(step, metrics))

    def event(self, event: dict[str, Any]) -> None:
        """Writes one event, at once, and warns of it."""
        self._write(event)
        _logger.warning(events.sentence(event))

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar where there is one."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def close(self) -> None:
        """Closes files and bar."""
        self._bar.close()
        self._write_pending()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write(self, record) -> None:
        self._pending += (json.dumps(record) + "\n").encode()
        self._write_pending()

    def _write_pending(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            _logger.warning(
                f"{self._file.name} cannot be written ({error.strerror}); "
                f"{len(self._pending)} bytes wait."
            )

    def _evaluation_line(self, step, metrics) -> str:
        shown = [
            f"{name} {metrics[f'held_out_{name}']:.4f}{self._beside(name)}"
            for name in ("accuracy", "loss")
        ]
        width = len(str(self._steps))
        line = f"step {step:>{width}}/{self._steps}  held-out {', '.join(shown)}"
        if "examples_per_second" in metrics:
            line += f", {metrics['examples_per_second']:,.0f} examples/s"
        return line

    def _beside(self, name) -> str:
        if name not in self._baseline:
            return ""
        return f" ({self._baseline_name} {self._baseline[name]:.4f})"


class Silent:
    """What a process has in place of a `MetricsLog` where another one writes it."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def advance(self, step: int) -> None:
        """Does nothing."""

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        """Does nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Does nothing."""

    def say(self, line: str) -> None:
        """Does nothing."""


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the reports in metrics.jsonl, without a last line cut short by a kill."""
    return [line for line in _lines(path) if "event" not in line]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events in metrics.jsonl; see `events`."""
    return [line for line in _lines(path) if "event" in line]


def check_tensorboard() -> None:
    """Raises ConfigError if tensorboardX is not installed."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        raise ConfigError(
            "config.training.tensorboard needs the package tensorboardX: "
            "pip install tensorboardX installs it."
        ) from None


def _open_tensorboard(folder):
    check_tensorboard()
    import tensorboardX

    return tensorboardX.SummaryWriter(str(folder))


def _lines(path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _drop_after(path, step) -> None:
    """Rewrites the log without the reports that resuming at `step` writes again."""
    if path.exists():
        kept = [json.dumps(line) for line in _lines(path) if line["step"] <= step]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)
