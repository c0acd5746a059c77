"""What happens to a run besides its reports: steps left out, and losses that jump."""

import math
from typing import Any

import numpy as np

from mha_haiku.training import health, stepping


def of_steps(first: int, report: stepping.Report, skipped: int) -> list[dict[str, Any]]:
    """Returns the events of one dispatch, in order, as lines of metrics.jsonl.

    Each has "step" and "event": "not_finite", with "what" is not ("loss" or
    "gradient") and how many steps were "skipped" so far, or "loss_spike", with the
    "loss" and by how many "deviations" it is above the mean of the window.

    Args:
      first: The steps taken before the dispatch.
      report: Of its steps, as host arrays.
      skipped: How many steps were skipped before it.
    """
    events = []
    flagged = ~report.finite | (report.deviations > health.SPIKE)
    for i in np.flatnonzero(flagged):
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


def sentence(event: dict[str, Any]) -> str:
    """Returns what a warning says of an event."""
    if event["event"] == "not_finite":
        return (
            f"The {event['what']} is not finite at step {event['step']}: it is not "
            f"applied ({event['skipped']} such so far)."
        )
    return (
        f"The loss jumped to {event['loss']:.4g} at step {event['step']}: "
        f"{event['deviations']:.1f} standard deviations above the mean of the "
        f"{health.WINDOW} steps before."
    )
