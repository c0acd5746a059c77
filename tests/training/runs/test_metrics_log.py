"""The files and output of a run during training."""

import io
import json
import sys

import numpy as np
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training import losses, stepping
from mha_haiku.training.runs import files, metrics_log

REPORT = {"loss": 1.5, "accuracy": 0.25, "examples_per_second": 12345.6}
EVALUATION = REPORT | {"held_out_loss": 1.25, "held_out_accuracy": 0.43}


def _open(folder, start=0, tensorboard=False, seconds=0.0):
    return metrics_log.MetricsLog(
        folder / "metrics.jsonl",
        start=start,
        tensorboard=tensorboard,
        seconds=seconds,
    )


def _console(start=0):
    return metrics_log.Console(
        start=start,
        steps=200,
        baseline={"accuracy": 0.17, "loss": 2.0},
        baseline_name="unigram",
    )


def test_each_report_is_a_line_at_once(tmp_path):
    with _open(tmp_path) as log:
        log.report(10, REPORT, learning_rate=0.5)
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        written = json.loads(line)
        assert written.pop("seconds") >= 0
        assert written == {"step": 10, **REPORT, "learning_rate": 0.5}
        log.report(20, EVALUATION, learning_rate=0.5)
    assert [x["step"] for x in metrics_log.read(tmp_path / "metrics.jsonl")] == [10, 20]


def test_report_and_evaluation_are_plain_lines_in_a_pipe(capsys):
    with _console() as console:
        console.report(10, REPORT)
        console.report(20, EVALUATION)
    out, err = capsys.readouterr()
    assert err == ""
    shown = "loss 1.5000, accuracy 0.250, 12,346 examples/s, 00:00 elapsed, 00:00 left"
    assert out.splitlines() == [
        f"step  10/200  {shown}",
        f"step  20/200  {shown}",
        "step  20/200  held-out accuracy 0.4300 (unigram 0.1700), "
        "loss 1.2500 (unigram 2.0000), 12,346 examples/s",
    ]


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_is_on_stderr_of_a_terminal_only(monkeypatch, capsys):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")  # some versions of tqdm cut lines to it
    with _console(start=10) as console:
        console.reach(15)
        console.report(20, EVALUATION)
    shown = terminal.getvalue()
    assert "20/200" in shown and "loss 1.5000, accuracy 0.250, 12,346 examples" in shown
    assert "held-out accuracy 0.4300" in capsys.readouterr().out


def test_tensorboard_writes_its_files_only_if_asked(tmp_path):
    for folder, asked in (("with", True), ("without", False)):
        (tmp_path / folder).mkdir()
        with _open(tmp_path / folder, tensorboard=asked) as log:
            log.report(10, REPORT, learning_rate=0.5)
        written = list((tmp_path / folder).glob("events.out.tfevents*"))
        assert len(written) == int(asked)


def test_missing_tensorboard_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="config.training.tensorboard .*tensorboardX"):
        metrics_log.check_tensorboard()


EVENT = {"step": 12, "event": "not_finite", "what": "loss", "skipped": 1}


def test_event_is_a_line_and_a_warning_and_no_report(tmp_path, caplog):
    with _open(tmp_path) as log:
        log.report(10, REPORT, learning_rate=0.5)
        log.event(EVENT)
        log.report(20, REPORT, learning_rate=0.5)
    path = tmp_path / "metrics.jsonl"
    assert metrics_log.read_events(path) == [EVENT]
    assert [x["step"] for x in metrics_log.read(path)] == [10, 20]
    assert "The loss is not finite at step 12" in caplog.text
    with _open(tmp_path, start=12):
        assert metrics_log.read_events(path) == [EVENT]
    with _open(tmp_path, start=11):
        assert metrics_log.read_events(path) == []
        assert [x["step"] for x in metrics_log.read(path)] == [10]


def test_seconds_go_on_where_the_run_stopped(tmp_path):
    with _open(tmp_path, seconds=100.0) as log:
        log.report(10, REPORT, learning_rate=0.5)
    (report,) = metrics_log.read(tmp_path / "metrics.jsonl")
    assert 100 <= report["seconds"] < 200


NAN = float("nan")


def _dispatch(loss, finite, deviations, rise=None):
    loss = np.asarray(loss, np.float32)
    sums = losses.Sums(loss, loss, np.full(len(loss), 4, np.float32))
    deviations = np.asarray(deviations)
    rise = deviations if rise is None else np.asarray(rise)
    return stepping.Report(sums, loss, np.asarray(finite), rise, deviations)


def test_events_are_those_of_their_steps(tmp_path, caplog):
    report = _dispatch(
        [8, NAN, 80, 6, 6], [True, False, True, False, True], [6.0, 0, 6.5, 0, -9]
    )
    events = metrics_log.events_of_steps(100, report, skipped=2, least_rise=1.0)
    assert events == [
        {"step": 102, "event": "not_finite", "what": "loss", "skipped": 3},
        {"step": 103, "event": "loss_spike", "loss": 20.0, "deviations": 6.5},
        {"step": 104, "event": "not_finite", "what": "gradient", "skipped": 4},
    ]
    with _open(tmp_path) as log:
        for event in events:
            log.event(event)
    assert [x.getMessage() for x in caplog.records] == [
        "The loss is not finite at step 102: it is not applied (3 such so far).",
        "The loss jumped to 20 at step 103: 6.5 standard deviations above the mean of "
        "the 128 steps before.",
        "The gradient is not finite at step 104: it is not applied (4 such so far).",
    ]


def test_quiet_steps_have_no_events():
    for report in (
        _dispatch([8, 8], [True] * 2, [0, 5.9]),
        _dispatch([], np.ones(0, bool), []),
        # sort at step 1356: 35 deviations up, and 0.05 nats of the 2 of chance
        _dispatch([0.2, 8], [True] * 2, [35.3, 0], [0.05, 0]),
    ):
        assert metrics_log.events_of_steps(7, report, skipped=1, least_rise=1.0) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"loss": 0.5}, r"report 1\.step must be an integer"),
        ({"step": 3, "loss": "low"}, r"report 1\.loss must be a number"),
        ({"step": 3, "loss": [0.5]}, r"report 1\.loss must be a number"),
        ({"step": 3, "seconds": True}, r"report 1\.seconds must be a number"),
    ],
)
def test_a_report_of_other_types_is_refused(tmp_path, line, message):
    with files.LineWriter(tmp_path / "metrics.jsonl") as log:
        log.append(line)
    with pytest.raises(ConfigError, match=f"metrics.jsonl cannot be used: {message}"):
        metrics_log.read(tmp_path / "metrics.jsonl")
