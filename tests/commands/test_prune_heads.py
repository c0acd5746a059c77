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
