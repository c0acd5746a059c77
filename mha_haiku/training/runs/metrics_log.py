"""The reports of a run: metrics.jsonl, and the lines that show them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mha_haiku.training.runs import files


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the reports in metrics.jsonl, by step; see `files.read_lines`."""
    # Runs of mha_haiku 0.2 also have lines of events there.
    return [line for line in files.read_lines(path) if "event" not in line]


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """Takes the metrics out of a report in metrics.jsonl."""
    others = ("step", "learning_rate", "seconds")
    return {name: value for name, value in report.items() if name not in others}


def lines_of(
    metrics: Mapping[str, float],
    *,
    times: str,
    baseline: Mapping[str, float],
    baseline_name: str,
) -> Iterator[str]:
    """Yields the lines that show a report: of training with `times`, and held-out."""
    rate = f"{metrics.get('examples_per_second', 0):,.0f} examples/s"
    if "loss" in metrics:
        accuracy = metrics.get("accuracy")  # of targets, where there are any
        accuracy_text = "" if accuracy is None else f", accuracy {accuracy:.3f}"
        yield f"loss {metrics['loss']:.4f}{accuracy_text}, {rate}, {times}"
    held_out = []
    for name in ("exact_match", "accuracy", "loss"):
        if (value := metrics.get(f"held_out_{name}")) is not None:
            text = f"{name.replace('_', ' ')} {value:.4f}"
            if name in baseline:
                text += f" ({baseline_name} {baseline[name]:.4f})"
            held_out.append(text)
    if held_out:
        yield f"held-out {', '.join(held_out)}"
