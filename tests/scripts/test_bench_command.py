"""The command line that the benchmarks share, and that their cases are well formed."""

import pytest

from scripts import (
    bench_attention,
    bench_attention_cases,
    bench_training,
    bench_training_cases,
)

_BENCHMARKS = [
    (bench_training, bench_training_cases.CASES),
    (bench_attention, bench_attention_cases.CASES),
]


def _duels(cases, is_quick):
    return [each for name in cases for each in cases[name](name, is_quick)]


@pytest.mark.parametrize("script, cases", _BENCHMARKS)
def test_help_names_the_cases_and_ends_well(capsys, script, cases):
    assert script.run(["bench", "--help"]) == 0
    told = capsys.readouterr().out
    for name in cases:
        assert name in told


@pytest.mark.parametrize("script, cases", _BENCHMARKS)
def test_the_cases_of_the_help_are_all_there_are(script, cases):
    assert script._CASES == tuple(cases)


@pytest.mark.parametrize(
    "script, arguments, parts",
    [
        (bench_training, "--case=revers", ["--case", "'revers'", "reverse", "start"]),
        (bench_attention, "--case=core_8129", ["--case", "'core_8129'", "'core_8192'"]),
        (bench_attention, "--case=reverse", ["--case", "'reverse'", "module_128"]),
        (bench_training, "--rounds=0", ["--rounds", "got 0"]),
        (bench_attention, "--rounds=many", ["--rounds"]),
        (bench_training, "--contenders=ours,hiaku", ["--contenders", "'haiku'"]),
        (bench_training, "--case=map --contenders=torch", ["'torch'", "formula"]),
        (bench_attention, "--case=core_8192 --contenders=flax", ["'flax'", "torch"]),
        (bench_training, "--json=no_such_folder/x.json", ["--json", "no_such_folder"]),
        (bench_attention, "--json=/", ["--json"]),
        (bench_attention, "--cases=compile", ["--cases", "'--case'"]),
        (bench_training, "reverse", ["'reverse' belongs to no flag"]),
    ],
)
def test_a_mistake_costs_status_2_and_two_lines(capsys, script, arguments, parts):
    assert script.run(["bench", *arguments.split()]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert 1 <= len(told.splitlines()) <= 2
    for part in parts:
        assert part in told


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("cases", [cases for _, cases in _BENCHMARKS])
def test_contenders_have_names_of_their_own_and_promises_are_of_them(cases, is_quick):
    for each in _duels(cases, is_quick):
        names = [contender.name for contender in each.contenders]
        assert len(set(names)) == len(names)
        assert {*each.bases} <= {*names}
        assert each.promises
        for promise in each.promises:
            assert {*promise.contenders} <= {*names}
