"""The script that makes a smaller model of a run."""

import pytest

from mha_haiku import commands, models
from mha_haiku.commands import config_files
from mha_haiku.subjects.verbs import prune_sweep
from mha_haiku.training.runs import folders
from tests.tiny_runs import write_untrained


@pytest.fixture
def untrained(tmp_path, monkeypatch):
    """The folder of a run of one layer and two heads, of step 3."""
    monkeypatch.setattr(prune_sweep, "_TIMED_SECONDS", 0.01)
    config = config_files.load("configs/reverse.py")
    config = config.replace(
        model=dict(
            num_layers=1,
            attention=dict(num_heads=2),
            feed_forward=dict(hidden_size=6),
        ),
        training=dict(evaluation_examples=8),
    )
    return write_untrained(tmp_path / "run", config)


def _run(*arguments):
    return commands.run(["prune_heads", *arguments])


@pytest.mark.slow
def test_heads_go_and_a_run_is_left(untrained, capsys):
    flags = ["--keep=0.5", "--order=confidence", "--examples=4"]
    assert _run(f"--workdir={untrained}", *flags) == 0
    out, told = capsys.readouterr()
    assert "pruned models: compiling" in told
    title, table, _, path = out.split("\n\n")
    assert title == "run (reverse), step 3: 2 heads, order by confidence"
    counts = [line.split()[0] for line in table.splitlines()[2:]]
    assert counts == ["2", "1"]
    folder = f"{untrained}_pruned"
    assert path == f"Pruned run: {folder}\n"
    run = folders.load_run(folder)
    layers = models.heads_of_layers(run.config.model)
    assert sum(len(layer.names) for layer in layers) == 1
    assert run.step == 0
    assert _run(f"--workdir={untrained}", *flags) == 2
    assert "holds a run; give an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--workdir=absent", "--keep=0.5"], "There is no run in absent"),
        (["--workdir=run"], "Give --sweep, or one of --keep and --metric_drop"),
        (["--workdir=run", "--keep=0.5", "--sizes=3"], "--sizes needs --sweep"),
        (["--workdir=run", "--sweep", "--steps=3"], "--steps does not fit --sweep"),
        (["--workdir=run", "--sweep", "--out=small"], "--out does not fit --sweep"),
        (["--workdir=run", "--sweep", "--sizes=0"], "sizes must be an integer of at"),
        (["--workdir=run", "--keep=2"], "keep must be a number in [0, 1]"),
        (["--workdir=run", "--keep=half"], "keep"),
    ],
)
def test_a_mistake_takes_two_lines_and_status_2(
    untrained, arguments, part, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    out, told = capsys.readouterr()
    assert out == "" and part in told
    assert len(told.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == [untrained]
