"""Faults during a run; `scripts/check_reliability.py` injects them from outside."""

import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import checkpoints, trainers
from mha_haiku.training.runs.checkpoints import contents
from tests.training.runs import faults

NO_DROPOUT = {"model__dropout_rate": 0.0}  # each device draws its own


@pytest.mark.slow
def test_dispatches_are_short_where_steps_are_long(make_config, tmp_path, monkeypatch):
    config = make_config(
        training__steps_per_dispatch=20, training__report_every=30
    ).replace(training=dict(evaluate_every=30, checkpoint_every=30))
    stops, seconds = [], [0.0, 0.5]  # sums of which are exact

    def clock():
        """Every look at the clock finds it 0.5 s later."""
        seconds[0] += seconds[1]
        return seconds[0]

    monkeypatch.setattr(trainers.time, "perf_counter", clock)
    faults.act(monkeypatch, lambda self: stops.append(self.step))
    faults.train(config, tmp_path / "a")
    # 0.5 s for the first step, so two next; then those took 0.5 s as well, and so on.
    assert stops == [1, 3, 7, 15, 30]
    first, stops[:], seconds[1] = faults.state(tmp_path / "a", config), [], 3.0
    faults.train(config, tmp_path / "b")
    assert stops == list(range(1, 31))
    # Nothing but the clock is in the results.
    again = faults.state(tmp_path / "b", config)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert faults.reports(tmp_path / "a") == faults.reports(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "window",
    [
        {"steps": 3},
        {"steps": 3, "seconds": 0},
        {"steps": 3, "seconds": 1.0, "gradient_norm": 1.0},
        {"steps": 3, "seconds": 1.0, "gradient_norm": 1.0, "loss": 1.0},
    ],
)
def test_a_window_that_training_does_not_write_is_refused(
    copy, make_config, monkeypatch, window
):
    monkeypatch.setattr(checkpoints.Checkpoints, "window", lambda self: window)
    (copy / "summary.json").unlink()
    with pytest.raises(ConfigError, match="step 30 has another window"):
        faults.train(make_config(), copy)


@pytest.mark.slow
def test_interruption_waits_for_its_checkpoint(make_config, tmp_path, monkeypatch):
    write = contents.write_arrays
    is_handled = []

    def write_slowly(*args):
        time.sleep(0.5)
        is_handled.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        write(*args)

    monkeypatch.setattr(contents, "write_arrays", write_slowly)
    faults.act(monkeypatch, faults.interrupt_at(14))
    summary = faults.train(make_config(), tmp_path)
    assert summary.interrupted and is_handled[-1]
    assert faults.state(tmp_path, make_config()).step == summary.steps == 14
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


@pytest.mark.slow
def test_damaged_checkpoint_is_trained_again_to_the_same_bits(
    make_config, whole, copy, caplog
):
    (_, wanted), reports = whole, faults.reports(copy)
    data = copy / "checkpoints" / "30" / "arrays.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    summary = faults.train(make_config(), copy)
    assert (summary.resumed_from, summary.steps) == (20, 30)
    (told,) = [x.getMessage() for x in caplog.records]
    assert "step 30" in told and "newest good one is of step 20" in told
    jax.tree.map(
        np.testing.assert_array_equal, faults.state(copy, make_config()), wanted
    )
    assert faults.reports(copy) == reports


@pytest.mark.slow
def test_run_without_a_good_checkpoint_does_not_start_afresh(make_config, copy):
    for path in (copy / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    before = sorted(copy.rglob("*"))
    with pytest.raises(ConfigError, match="No checkpoint in .* is good: step 30: it"):
        faults.train(make_config(), copy)
    assert sorted(copy.rglob("*")) == before


@pytest.mark.slow
def test_run_whose_checkpoints_are_gone_says_that_it_starts_afresh(
    make_config, copy, caplog
):
    shutil.rmtree(copy / "checkpoints")
    assert faults.train(make_config(), copy).resumed_from == 0
    assert "has reports up to step 30 and no checkpoint" in caplog.text


@pytest.mark.slow
def test_killed_while_it_compiles_leaves_a_folder_to_start_in(
    make_config, tmp_path, monkeypatch
):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainers, "Trainer", killed)
        with pytest.raises(KeyboardInterrupt):
            faults.train(make_config(), tmp_path)
    assert faults.train(make_config(), tmp_path).steps == 30


@pytest.mark.slow
def test_full_disk_is_a_warning_and_the_run_ends_as_it_would_have(
    make_config, whole, tmp_path, monkeypatch, caplog
):
    write, failed = contents.write_arrays, []

    def fail_at_ten(folder, tree):
        if tree.step == 10:
            failed.append(True)
            raise OSError(28, "No space left on device")
        write(folder, tree)

    monkeypatch.setattr(contents, "write_arrays", fail_at_ten)
    summary = faults.train(make_config(), tmp_path)
    assert failed and summary.steps == 30
    assert "step 10 could not be written" in caplog.text
    found = faults.state(tmp_path, make_config())
    jax.tree.map(np.testing.assert_array_equal, found, whole[1])


@pytest.mark.slow
def test_last_save_that_fails_ends_the_run_with_an_error(
    make_config, tmp_path, monkeypatch
):
    write = contents.write_arrays

    def fail_at_the_end(folder, tree):
        if tree.step > 20:
            raise OSError(28, "No space left on device")
        write(folder, tree)

    with monkeypatch.context() as patch:
        patch.setattr(contents, "write_arrays", fail_at_the_end)
        with pytest.raises(checkpoints.SaveError, match="step 30 .*good one is of st"):
            faults.train(make_config(), tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert not (tmp_path / "lock.json").exists()
    assert faults.train(make_config(), tmp_path).resumed_from == 20


@pytest.mark.slow
def test_other_number_of_devices_has_the_same_losses(
    make_config, tmp_path, monkeypatch
):
    config = make_config(**NO_DROPOUT)
    faults.train(config, tmp_path / "wanted", devices=1)
    stops = iter((10, 20, None))
    at = []
    faults.act(
        monkeypatch,
        lambda self: self.step == at[0] and faults.interrupt_at(at[0])(self),
    )
    for number in (1, 4, 1):
        at[:] = [next(stops)]
        summary = faults.train(config, tmp_path / "found", devices=number)
    assert (summary.resumed_from, summary.steps) == (20, 30)
    found, wanted = (
        faults.reports(tmp_path / "found"),
        faults.reports(tmp_path / "wanted"),
    )
    assert [x.keys() for x in found] == [x.keys() for x in wanted]
    for name in ("loss", "held_out_loss"):
        losses = [[x.get(name, 0) for x in reports] for reports in (found, wanted)]
        np.testing.assert_allclose(*losses, atol=1e-5)
