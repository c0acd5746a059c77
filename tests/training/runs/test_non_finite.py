"""Steps that are not finite end a run or are skipped, and spikes are logged."""

import json

import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import metrics_log
from tests.training.runs import faults

SMALL = {"model__num_layers": 1, "model__dropout_rate": 0.0}  # quick to compile
SKIP = {**SMALL, "training__non_finite": "skip", "training__max_skips": 2}


@pytest.mark.slow
def test_gradient_that_is_not_finite_ends_the_run(make_config, tmp_path, monkeypatch):
    faults.break_steps(monkeypatch, [13, 15], gradient=np.nan)
    message = "gradient is not finite at step 13; the last good .* of step 10"
    with pytest.raises(runs.NonFiniteLossError, match=message):
        faults.train(make_config(**SMALL), tmp_path)
    assert faults.state(tmp_path, make_config(**SMALL)).step == 10
    (event,) = metrics_log.read_events(tmp_path / "metrics.jsonl")
    assert (event["step"], event["what"]) == (13, "gradient")


@pytest.mark.slow
def test_skipped_steps_are_counted_and_logged(
    make_config, tmp_path, monkeypatch, caplog
):
    config = make_config(**SKIP)
    faults.break_steps(monkeypatch, [6, 7, 8, 9, 10, 23], gradient=np.inf, loss=np.nan)
    config = config.replace(training=dict(max_skips=5))
    summary = faults.train(config, tmp_path)
    assert (summary.steps, summary.skipped_steps) == (30, 6)
    events = metrics_log.read_events(tmp_path / "metrics.jsonl")
    assert [x["step"] for x in events] == [6, 7, 8, 9, 10, 23]
    assert [x["skipped"] for x in events] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("is not finite") == 6
    reports = {x["step"]: x for x in faults.reports(tmp_path)}
    assert "loss" not in reports[10]  # none of its steps has one
    assert np.isfinite(reports[10]["held_out_loss"])
    assert np.isfinite([x["loss"] for at, x in reports.items() if at != 10]).all()
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_skips_in_a_row_are_limited_across_a_resume(make_config, tmp_path, monkeypatch):
    config = make_config(**SKIP)
    faults.break_steps(monkeypatch, [13, 14, 15, 16], gradient=np.nan)
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(14))
        assert faults.train(config, tmp_path).steps == 14
    message = "not finite at step 15, as in all of the last 3 steps; .* of step 14"
    with pytest.raises(runs.NonFiniteLossError, match=message):
        faults.train(config, tmp_path)
    assert faults.state(tmp_path, config).health.skipped == 2


@pytest.mark.slow
def test_spikes_are_logged_and_the_same_after_a_resume(
    make_config, tmp_path, monkeypatch, caplog
):
    config = make_config(
        **SMALL, training__steps=160, training__steps_per_dispatch=50
    ).replace(training=dict(report_every=40, evaluate_every=80, checkpoint_every=140))
    faults.break_steps(monkeypatch, [150], loss=1000.0)
    faults.train(config, tmp_path / "whole")
    (event,) = metrics_log.read_events(tmp_path / "whole" / "metrics.jsonl")
    assert (event["event"], event["step"]) == ("loss_spike", 150)
    assert event["deviations"] > 6
    assert "The loss jumped" in caplog.text
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(140))
        assert faults.train(config, tmp_path / "parts").steps == 140
    assert faults.train(config, tmp_path / "parts").resumed_from == 140
    again = metrics_log.read_events(tmp_path / "parts" / "metrics.jsonl")
    assert again == [event]


@pytest.mark.parametrize("field", ["non_finite", "max_skips"])
def test_policy_is_checked(make_config, field):
    with pytest.raises(ConfigError, match=f"config.training.{field} must be"):
        make_config(**{f"training__{field}": "ignore"})
