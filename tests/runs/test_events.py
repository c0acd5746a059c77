"""The events of a dispatch, and what is said of them."""

import numpy as np

from mha_haiku.runs import events
from mha_haiku.training import losses, stepping

NAN = float("nan")


def _report(loss, finite, deviations):
    loss = np.asarray(loss, np.float32)
    sums = losses.Sums(loss, loss, np.full(len(loss), 4, np.float32))
    return stepping.Report(sums, loss, np.asarray(finite), np.asarray(deviations))


def test_events_are_those_of_their_steps():
    report = _report(
        [8, NAN, 80, 6, 6], [True, False, True, False, True], [6.0, 0, 6.5, 0, -9]
    )
    found = events.of_steps(100, report, skipped=2)
    assert found == [
        {"step": 102, "event": "not_finite", "what": "loss", "skipped": 3},
        {"step": 103, "event": "loss_spike", "loss": 20.0, "deviations": 6.5},
        {"step": 104, "event": "not_finite", "what": "gradient", "skipped": 4},
    ]
    assert [events.sentence(event) for event in found] == [
        "The loss is not finite at step 102: it is not applied (3 such so far).",
        "The loss jumped to 20 at step 103: 6.5 standard deviations above the mean of "
        "the 128 steps before.",
        "The gradient is not finite at step 104: it is not applied (4 such so far).",
    ]


def test_quiet_steps_have_none():
    assert events.of_steps(7, _report([8, 8], [True] * 2, [0, 5.9]), skipped=1) == []
    assert events.of_steps(7, _report([], np.ones(0, bool), []), skipped=1) == []
