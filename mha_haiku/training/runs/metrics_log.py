"""The reports of a run: metrics.jsonl, and what the console shows of them."""

from pathlib import Path
from typing import Any

from mha_haiku.training.runs import files, progress


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the reports in metrics.jsonl, by step; see `files.read_lines`."""
    # Runs of mha_haiku 0.2 also have lines of events there.
    return [line for line in files.read_lines(path) if "event" not in line]


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """Takes the metrics out of a report in metrics.jsonl."""
    others = ("step", "learning_rate", "seconds")
    return {name: value for name, value in report.items() if name not in others}


class Console(progress.Bar):
    """Shows the metrics of a run as they arrive.

    On a terminal a bar on stderr shows the progress, elsewhere a report prints a line
    on stdout with the time left. An evaluation always prints a line on stdout, with the
    task's baselines.
    """

    def __init__(
        self, *, start: int, steps: int, baseline: dict[str, float], baseline_name: str
    ):
        super().__init__(steps, unit="step", start=start, leave=True, prints=False)
        self._baseline = baseline
        self._baseline_name = baseline_name

    def reach(self, step: int) -> None:
        self.update(step - self.n)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics of a step by name."""
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
                progress.tell(f"{place}  {', '.join([*shown, self.times()])}")
        shown = []
        for name in ("exact_match", "accuracy", "loss"):
            if (value := metrics.get(f"held_out_{name}")) is not None:
                text = f"{name.replace('_', ' ')} {value:.4f}"
                if name in self._baseline:
                    text += f" ({self._baseline_name} {self._baseline[name]:.4f})"
                shown.append(text)
        if shown:
            progress.tell(f"{place}  held-out {', '.join([*shown, *rate])}")
