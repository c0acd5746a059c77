"""The reports of a run, and the lines that show them."""

from mha_haiku.training.runs import files, metrics_log

REPORT = {"loss": 1.5, "accuracy": 0.25, "examples_per_second": 12345.6}
EVALUATION = REPORT | {"held_out_loss": 1.25, "held_out_accuracy": 0.43}


def _lines(metrics):
    baseline = {"accuracy": 0.17, "loss": 2.0}
    shown = {"baseline": baseline, "baseline_name": "unigram"}
    return list(metrics_log.lines_of(metrics, times="00:01 left", **shown))


def test_a_report_is_a_line_and_an_evaluation_another():
    training = "loss 1.5000, accuracy 0.250, 12,346 examples/s, 00:01 left"
    assert _lines(REPORT) == [training]
    assert _lines(EVALUATION) == [
        training,
        "held-out accuracy 0.4300 (unigram 0.1700), loss 1.2500 (unigram 2.0000)",
    ]
    assert _lines({}) == []  # of a run that resumes at its last step


def test_events_of_0_2_are_no_reports(tmp_path):
    with files.LineWriter(tmp_path / "metrics.jsonl") as log:
        log.append({"step": 10, "event": "loss_spike", "loss": 3.0})
        log.append({"step": 20, "loss": 1.5, "seconds": 2.0, "learning_rate": 0.1})
    (report,) = metrics_log.read(tmp_path / "metrics.jsonl")
    assert metrics_log.metrics_of(report) == {"loss": 1.5}
