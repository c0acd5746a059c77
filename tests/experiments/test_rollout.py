"""The script that compares roll-out with blanking inputs out."""

import numpy as np
import pytest

from experiments import config_files, rollout
from mha_haiku.runs import configuration, loop
from mha_haiku.studies import rollouts

CONFIG = "configs/papers/rollout.py"


def test_a_run_gets_a_table_a_csv_and_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    asked, trained = [], []
    correlations = {name: np.eye(3, 2) for name in ("raw", "roll-out", "flow")}
    study = rollouts.Study("reverse, step 3", correlations, correlations)

    def measure(workdir, **options):
        asked.append((workdir, options))
        return study

    monkeypatch.setattr(rollouts, "measure", measure)
    monkeypatch.setattr(loop, "train", lambda *arguments: trained.append(arguments))
    run = str(tmp_path / "run")
    flags = [f"--workdir={run}", "--examples=3", "--flow_examples=1", "--train"]
    assert rollout.run(["rollout", *flags]) == 0
    out, told = capsys.readouterr()
    assert told == ""
    title, table, verdict, paths = out.split("\n\n")
    assert title == "reverse, step 3: means over 3 held-out examples"
    assert "raw                        0.69" in table
    assert verdict.startswith("Published: roll-out 0.71, raw attention 0.29.")
    folder = tmp_path / "run" / "attention"
    assert sorted(x.name for x in folder.iterdir()) == ["rollout.csv", "rollout.png"]
    for path in folder.iterdir():
        assert str(path) in paths
    ((config, workdir),) = trained
    assert configuration.to_json(config) == configuration.to_json(
        config_files.load(CONFIG)
    )
    assert workdir == run
    options = {"step": None, "examples": 3, "flow_examples": 1}
    assert asked == [(run, options)]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--workdir=... is missing"),
        (["--workdir=absent"], "There is no run in absent"),
        (["--workdir=absent", "--examples=0"], "examples must be"),
        (["--workdir=absent", "--flows=3"], "There is no flag --flows"),
    ],
)
def test_a_mistake_takes_two_lines_and_status_2(
    arguments, part, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert rollout.run(["rollout", *arguments]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert 1 <= len(told.splitlines()) <= 2
    assert part in told
