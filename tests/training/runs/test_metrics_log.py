"""The output of a run during training."""

import io
import sys

from mha_haiku.training.runs import files, metrics_log

REPORT = {"loss": 1.5, "accuracy": 0.25, "examples_per_second": 12345.6}
EVALUATION = REPORT | {"held_out_loss": 1.25, "held_out_accuracy": 0.43}


def _console(start=0):
    return metrics_log.Console(
        start=start,
        steps=200,
        baseline={"accuracy": 0.17, "loss": 2.0},
        baseline_name="unigram",
    )


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


def test_events_of_0_2_are_no_reports(tmp_path):
    with files.LineWriter(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 10, "event": "loss_spike", "loss": 3.0})
        log.append({"step": 20, "loss": 1.5, "seconds": 2.0, "learning_rate": 0.1})
    (report,) = metrics_log.read(tmp_path / "metrics.jsonl")
    assert metrics_log.metrics_of(report) == {"loss": 1.5}
