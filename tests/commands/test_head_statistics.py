"""The script that prints, writes and draws what heads do."""

import csv
import json
import re
import shutil

import jax
import numpy as np
import pytest

import mha_haiku as mh
from mha_haiku import attention, commands
from mha_haiku.commands import config_files
from tests.tiny_runs import write_untrained


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a run of two layers and two heads, with a checkpoint of step 3."""
    config = config_files.load("configs/reverse.py").replace(
        model=dict(num_layers=2, attention=dict(num_heads=2))
    )
    return write_untrained(tmp_path_factory.mktemp("runs") / "run", config, value=0.1)


@pytest.fixture
def untrained(stored, tmp_path):
    """A copy of it."""
    return shutil.copytree(stored, tmp_path / "run")


def _run(*arguments):
    return commands.run(["head_statistics", *arguments])


@pytest.mark.slow
def test_a_run_gets_a_table_a_csv_and_a_picture(untrained, capsys):
    pytest.importorskip("matplotlib")
    assert _run(f"--workdir={untrained}", "--examples=5") == 0
    out, told = capsys.readouterr()
    assert "head statistics: compiling" in told
    title, *tables, legend, paths = out.split("\n\n")
    assert title == "run (reverse), step 3: means over 5 held-out examples"
    for table in tables:
        assert [line.split()[:2] for line in table.splitlines()[2:]] == [
            ["0", "0"],
            ["0", "1"],
            ["1", "0"],
            ["1", "1"],
        ]
    for name, entry in attention.STATISTICS.items():
        if name not in ("chosen_positions", "num_queries"):
            assert sum(name in table.split() for table in tables) == 1
            assert f"{entry.label}, {entry.unit}" in legend
    folder = untrained / "attention"
    written = sorted(folder.glob("[!.]*"))
    assert [x.suffix for x in written] == [".csv", ".npz", ".png"]
    for path in written:
        assert path.stem == "head_statistics" and str(path) in paths


@pytest.mark.slow
def test_a_statistic_that_is_added_shows_everywhere(untrained, capsys, monkeypatch):
    entry = attention.Statistic(
        "beyond_the_first",
        "share of what is there",
        "attention on all positions but the first",
        (attention.observation.weighted_sum(lambda tile: tile.columns.array() != 0),),
    )
    # What a line in STATISTICS does as the module is imported.
    monkeypatch.setitem(attention.STATISTICS, entry.name, entry)

    # Sizes of no other test, whose programs know no such statistic.
    assert _run(f"--workdir={untrained}", "--examples=13") == 0
    out = capsys.readouterr().out
    assert entry.name in out and f"{entry.label}, {entry.unit}" in out
    with (untrained / "attention" / "head_statistics.csv").open() as file:
        rows = list(csv.DictReader(file))
    shares = [float(row[entry.name]) for row in rows]
    firsts = [float(row["first_token"]) for row in rows]
    np.testing.assert_allclose(shares, 1 - np.array(firsts), rtol=1e-5)

    heads = mh.load(untrained).statistics(13)
    assert entry.name in repr(heads) and entry.name in heads._repr_html_()
    assert entry.label in [axes.get_title("left") for axes in mh.plot(heads).axes]

    indices = "--indices=" + ",".join(map(str, range(11)))
    command = ["dump_attention", f"--workdir={untrained}", indices]
    assert commands.run(command) == 0
    saved = (untrained / "attention" / "index.html").read_text()
    query, key = jax.random.normal(jax.random.key(0), (2, 3, 19, 5, 4))
    _, attention_map = mh.attend(query, key, key)
    for html, count in ((saved, 2), (mh.show(attention_map).html, 5)):
        data = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', html)[1]
        (maps,) = json.loads(data)["sets"]
        numbers = {each["name"]: each for each in maps["numbers"]}
        number = numbers[entry.name]
        assert (number["unit"], number["label"]) == (entry.unit, entry.label)
        assert len(number["values"][0]) == count
        np.testing.assert_allclose(
            number["values"], 1 - np.array(numbers["first_token"]["values"]), 1e-5
        )
