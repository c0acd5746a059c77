"""Several seeds in one program: each model equals the model of a separate run."""

import collections
import json
import shutil

import jax
import numpy as np
import pytest

from mha_haiku import runs
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.runs import checkpoints, folders, metrics_log
from tests import tiny_runs
from tests.training.runs import faults

SEEDS = (3, 4, 5)


@pytest.fixture(scope="module")
def three(make_config, tmp_path_factory):
    """A config of three seeds, and the folder of its runs, trained without a stop."""
    config = make_config(training__seeds=3)
    together = tmp_path_factory.mktemp("together") / "run"
    faults.train(config, together)
    return config, together


def _assert_same_runs(found, wanted, config, seeds=SEEDS):
    for own, _ in folders.of_runs(folders.Folder(wanted), config):
        if own.seed in seeds:
            jax.tree.map(
                np.testing.assert_array_equal,
                faults.state(found / f"seed_{own.seed}", own),
                faults.state(wanted / f"seed_{own.seed}", own),
            )


@pytest.mark.slow
def test_each_model_is_that_of_its_run_alone(three, whole, make_config, tmp_path):
    _, root = three
    faults.train(make_config(seed=5), tmp_path)
    for seed, alone in ((3, whole[0]), (5, tmp_path)):
        own = root / f"seed_{seed}"
        for report, wanted in zip(
            faults.reports(own), faults.reports(alone), strict=True
        ):
            assert report == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        model, wanted = (runs.load(each).params for each in (own, alone))
        for module in model:
            for name, values in model[module].items():
                # Nothing depends on a key's bias, whose gradient is rounding, which
                # Adam makes as large as any.
                if not (module.endswith("attention/key") and name == "b"):
                    np.testing.assert_allclose(
                        values, wanted[module][name], atol=1e-5, err_msg=module
                    )
    first, last = (faults.reports(root / f"seed_{seed}")[-1] for seed in (3, 5))
    assert abs(first["loss"] - last["loss"]) > 1e-3


@pytest.mark.slow
def test_each_folder_is_a_run_and_the_one_above_sums_up(three):
    config, root = three
    losses = []
    for seed in SEEDS:
        run = runs.load(root / f"seed_{seed}")
        assert (run.config.seed, run.config.training.seeds, run.step) == (seed, 1, 30)
        own = json.loads((root / f"seed_{seed}" / "summary.json").read_text())
        assert set(own) == set(runs.Summary._fields)
        losses.append(own["metrics"]["held_out_loss"])
    summary = json.loads((root / "summary.json").read_text())
    assert summary["metrics"]["held_out_loss"] == pytest.approx(np.mean(losses))
    assert summary["spread"]["held_out_loss"] == pytest.approx(np.std(losses, ddof=1))
    assert [summary["each"][str(seed)]["held_out_loss"] for seed in SEEDS] == losses
    assert folders.read_config(folders.Folder(root)) == config
    with pytest.raises(ConfigError, match=r"seed_3, seed_4, seed_5\.\n.*run/seed_3"):
        runs.load(root)


@pytest.mark.slow
def test_ended_runs_are_left_as_they_are(three, capsys):
    config, root = three
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.*")}
    summary = faults.train(config, root)
    assert "has ended at step 30" in capsys.readouterr().out
    assert summary == runs.SeedsSummary(
        **json.loads((root / "summary.json").read_text())
    )
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.*")} == before


@pytest.mark.slow
def test_interrupted_runs_go_on_bit_for_bit(three, tmp_path, monkeypatch):
    config, root = three
    with monkeypatch.context() as patch:
        faults.act(patch, faults.interrupt_at(14))
        assert faults.train(config, tmp_path).interrupted
    # As if it had been killed while it saved: one is behind, and catches up.
    for step in (10, 14):
        shutil.rmtree(tmp_path / "seed_4" / "checkpoints" / str(step))
    saved, save = [], checkpoints.Checkpoints.save

    def noted(self, step, state, **options):
        saved.append((self, step))
        save(self, step, state, **options)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", noted)
    summary = faults.train(config, tmp_path)
    # A model that is ahead is not saved while another catches up.
    steps = collections.defaultdict(list)
    for stored, step in saved:
        steps[stored].append(step)
    assert sorted(steps.values()) == [[10, 20, 30], [20, 30], [20, 30]]
    assert (summary.resumed_from, summary.steps) == (0, 30)
    _assert_same_runs(tmp_path, root, config)
    for name in ("seed_3", "seed_4", "seed_5"):
        assert faults.reports(tmp_path / name) == faults.reports(root / name)


@pytest.mark.slow
def test_nan_in_one_model_leaves_the_others_alone(three, tmp_path, monkeypatch, caplog):
    config, _ = three
    # The same program, in which no model of these is broken: another one is not the
    # same to the last bit on every version of JAX.
    with monkeypatch.context() as whole:
        faults.break_steps(whole, range(17, 31), loss=np.nan, of_seed=6)
        faults.train(config, root := tmp_path / "whole")
    faults.break_steps(monkeypatch, range(17, 31), loss=np.nan, of_seed=4)
    tmp_path = tmp_path / "broken"
    summary = faults.train(config, tmp_path)
    message = "loss is not finite at step 17; the last good checkpoint is of step 10"
    assert message in summary.failed["4"] and list(summary.failed) == ["4"]
    assert "Seed 4 has ended" in caplog.text
    assert "seed 4: The loss is not finite at step 17" in caplog.text
    events = metrics_log.read_events(tmp_path / "seed_4" / "metrics.jsonl")
    assert [event["step"] for event in events] == [17]
    kept = [int(path.name) for path in (tmp_path / "seed_4/checkpoints").glob("[0-9]*")]
    assert max(kept) == 10  # nothing of it was saved afterwards
    assert set(summary.each) == {"3", "5"}
    assert not (tmp_path / "seed_4" / "summary.json").exists()
    _assert_same_runs(tmp_path, root, config, seeds=(3, 5))


@pytest.mark.slow
def test_each_starts_from_another_run_as_alone(three, whole, make_config, tmp_path):
    started = []
    config = make_config(training__seeds=3, init_from=str(whole[0]))
    observer = runs.Observer(30, lambda step, params: started.append((step, params)))
    faults.train(config, tmp_path / "three", observers=[observer])
    wanted = runs.load(whole[0]).params
    assert [step for step, _ in started] == [0, 0, 0, 30, 30, 30]
    for _, params in started[:3]:
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
    alone = make_config(seed=5, init_from=str(whole[0]))
    faults.train(alone, tmp_path / "alone")
    reports = [faults.reports(tmp_path / path) for path in ("three/seed_5", "alone")]
    for report, own in zip(*reports, strict=True):
        assert report == pytest.approx(own, rel=1e-5, abs=1e-6)
    assert reports[0] != faults.reports(tmp_path / "three/seed_4")


@pytest.mark.slow
def test_other_seeds_in_the_folder_are_refused(three, whole, make_config):
    config, root = three
    for other, folder in (
        (make_config(training__seeds=4), root),
        (make_config(training__seeds=3, seed=2), root),
        (make_config(), root),
        (config, whole[0]),
    ):
        with pytest.raises(ConfigError, match="config.training.seeds must be .*\n"):
            faults.train(other, folder, override_config=True)


@pytest.mark.parametrize("shared", [{"heads": 2}, {"shard_parameters": True}])
def test_devices_that_share_models_are_refused(make_config, shared):
    config = make_config(training__seeds=2).replace(devices=shared)
    with pytest.raises(ConfigError, match="config.training.seeds must be 1 where"):
        tiny_runs.check_devices(config, 2)
