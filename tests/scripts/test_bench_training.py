"""The benchmark's command line, and one tiny run of it."""

import json
import pathlib
import subprocess
import sys

import pytest

from scripts import bench_cases, bench_training

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def _run(*arguments):
    return bench_training.run(["bench_training", *arguments])


def test_help_names_the_cases_and_ends_well(capsys):
    assert _run("--help") == 0
    told = capsys.readouterr().out
    for name in bench_cases.CASES:
        assert name in told


def test_the_cases_of_the_help_are_all_there_are():
    assert bench_training._CASES == tuple(bench_cases.CASES)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--case=revers"], ["--case", "'revers'", "reverse", "length_64"]),
        (["--rounds=0"], ["--rounds", "got 0"]),
        (["--rounds=many"], ["--rounds"]),
        (["--contenders=ours,hiaku"], ["--contenders", "'hiaku'", "'haiku'"]),
        (["--case=map", "--contenders=torch"], ["--contenders", "'torch'", "formula"]),
        (["--json=no_such_folder/x.json"], ["--json", "no_such_folder"]),
        (["--json=/"], ["--json"]),
        (["--cases=reverse"], ["--cases", "'--case'"]),
        (["reverse"], ["'reverse' belongs to no flag"]),
    ],
)
def test_a_mistake_costs_status_2_and_two_lines(capsys, arguments, parts):
    assert _run(*arguments) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert 1 <= len(told.splitlines()) <= 2
    for part in parts:
        assert part in told


def test_every_promise_is_of_contenders_that_take_part():
    for each in bench_cases.cases(tuple(bench_cases.CASES), is_quick=False):
        names = {contender.name for contender in each.contenders}
        assert set(each.bases) <= names
        for promise in each.promises:
            assert {promise.contender, promise.base or promise.contender} <= names


def _quick(folder, *arguments):
    """Returns what a run of the script prints, and its record of the only duel."""
    path = folder / "samples.json"
    script = _REPOSITORY / "scripts" / "bench_training.py"
    done = subprocess.run(
        [sys.executable, script, "--quick", f"--json={path}", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "these times mean nothing" in done.stdout
    (record,) = json.loads(path.read_text())["duels"]
    return done.stdout, record


def test_quick_run_of_a_command(tmp_path):
    told, record = _quick(tmp_path, "--case=start", "--contenders=help")
    (result,) = record["results"]
    assert (result["name"], len(result["samples"])) == ("help", 2)
    assert "help" in told and "ms/start" in told
    assert "promised" not in told


@pytest.mark.slow
def test_quick_run_against_plain_haiku(tmp_path):
    told, record = _quick(tmp_path, "--case=reverse", "--contenders=ours,haiku")
    assert "time / haiku" in told
    ours, haiku = record["results"]
    assert (ours["name"], haiku["name"]) == ("ours", "haiku")
    for result in (ours, haiku):
        assert len(result["samples"]) == 2
        assert all(sample["seconds"] > 0 for sample in result["samples"])
        assert 2.2 < result["facts"]["last loss"] < 2.7  # nearly log(10) at the start
    # The same model: embeddings, positions, a layer, the last norm and the logits.
    parameters = 320 + 512 + 2 * 64 + 4 * 1056 + (2112 + 2080) + 64 + 330
    assert ours["facts"]["parameters"] == parameters
    assert haiku["facts"]["parameters"] == parameters
