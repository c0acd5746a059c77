"""The script that compares roll-out with blanking inputs out."""

import types

import numpy as np
import pytest

from mha_haiku import commands
from mha_haiku.commands import config_files
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs.replacement import Study
from mha_haiku.training.runs import loop

CONFIG = "configs/papers/rollout.py"


@pytest.mark.parametrize("task", ["masked_language_model", "reverse"])
def test_a_run_gets_a_table_a_csv_and_a_picture(tmp_path, monkeypatch, capsys, task):
    pytest.importorskip("matplotlib")
    asked, trained = [], []
    correlations = {name: np.eye(3, 2) for name in ("raw", "roll-out", "flow")}
    config = config_files.load(CONFIG).replace(task=dict(name=task))
    subject = Subject(None, None, "run", config=config)

    def measure(subject, *, published, **options):
        asked.append((subject, options))
        return Study("title", correlations, correlations, published or {})

    monkeypatch.setattr(Subject, "of_folder", lambda *_, **__: subject)
    monkeypatch.setattr(Subject, "rollout", measure)
    monkeypatch.setattr(loop, "train_whole", lambda *given: trained.append(given))
    workdir = str(tmp_path / "run")
    flags = [f"--workdir={workdir}", "--examples=3", "--flow_examples=1", "--train"]
    assert commands.run(["rollout", *flags]) == 0
    out, told = capsys.readouterr()
    assert told == ""
    title, table, verdict, paths = out.split("\n\n")
    assert title == "title"
    # Only that very model on that very task is judged by the paper's numbers.
    is_paper = task == "masked_language_model"
    assert ("0.69" in table) == is_paper
    assert verdict.startswith("Published: roll-out 0.71") == is_paper
    folder = tmp_path / "run" / "attention"
    assert sorted(x.name for x in folder.iterdir()) == ["rollout.csv", "rollout.png"]
    for path in folder.iterdir():
        assert str(path) in paths
    (arguments,) = trained
    assert arguments[0] == config_files.load(CONFIG)
    assert arguments[1] == workdir
    assert asked == [(subject, {"examples": 3, "flow_examples": 1})]


def test_half_a_training_is_not_measured(tmp_path, monkeypatch, capsys):
    summary = types.SimpleNamespace(interrupted=True)
    monkeypatch.setattr(loop, "train", lambda *given: summary)
    monkeypatch.setattr(Subject, "rollout", None)
    assert commands.run(["rollout", f"--workdir={tmp_path}", "--train"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--workdir=absent"], "There is no run in absent"),
        (["--workdir=absent", "--examples=0"], "--examples must be an integer of at"),
        (
            ["--workdir=absent", "--examples=8", "--flow_examples=9"],
            "--flow_examples, at most as many as --examples, must be an integer from 1 "
            "to 8, got 9",
        ),
    ],
)
def test_a_mistake_takes_two_lines_and_status_2(
    arguments, part, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["rollout", *arguments]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert 1 <= len(told.splitlines()) <= 2
    assert part in told
