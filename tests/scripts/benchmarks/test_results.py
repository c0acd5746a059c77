"""Statistics of duels and promises, on samples made up so that answers are known."""

import os

import pytest

from scripts.benchmarks import duel, results

_LOUD = float(os.cpu_count())  # others keep every processor busy


def _result(name, seconds, foreign=None, **fields):
    foreign = foreign or [0.0] * len(seconds)
    samples = [duel.Sample(*pair) for pair in zip(seconds, foreign, strict=True)]
    return duel.Result(name, samples, **fields)


@pytest.mark.parametrize(
    ("seconds", "foreign", "expected"),
    [
        ([5.0, 1.0, 4.0, 2.0, 3.0], None, (2.0, 3.0, 4.0, 5, 5)),
        ([2.0], None, (2.0, 2.0, 2.0, 1, 1)),
        ([1.0, 9.0, 1.0, 9.0], [0.0, _LOUD, 0.0, _LOUD], (1.0, 1.0, 1.0, 2, 4)),
        ([1.0, 9.0, 9.0], [0.0, _LOUD, _LOUD], (5.0, 9.0, 9.0, 1, 3)),
    ],
    ids=["quartiles", "one", "enough quiet ones", "too few quiet ones"],
)
def test_spread_is_that_of_quiet_samples_where_they_are_enough(
    seconds, foreign, expected
):
    assert results.seconds(_result("a", seconds, foreign)) == expected


def test_ratio_is_taken_within_rounds_that_are_quiet_for_both():
    # Both slow down alike from round to round.
    mine = _result("a", [2.0, 20.0, 9.0, 6.0], [0.0, 0.0, _LOUD, 0.0])
    base = _result("b", [4.0, 40.0, 1.0, 12.0])
    assert results.ratio(mine, base) == (0.5, 0.5, 0.5, 3, 4)


def test_table_shows_times_ratios_facts_and_load():
    rows = [
        _result("mine", [0.001, 0.003, 0.002], facts={"parameters": 1234}),
        _result("base", [0.004], [_LOUD], facts={"peak MiB": 3.1}),
        duel.Result("absent", missing="flax", fault="no module"),
    ]
    header, mine, base, warning = results.table(rows, "base", "step")
    assert "ms/step" in header and "time / base" in header
    assert mine.split() == "mine 2 1.5 - 2.5 500 0 0.25 0.25 - 0.25 3/3 1,234 -".split()
    assert base.split()[-4:] == ["0/1", "!", "-", "3.1"]
    assert warning.startswith("! LOADED")
    (trouble,) = results.troubles(rows, "this[that]")
    assert "'flax'" in trouble and "pip install this[that]" in trouble


_PROMISE = results.Promise("a", 1.0, "b", aim=0.5)
_ROWS = [
    _result("a", [2.0, 4.0, 3.0], facts={"flops": 3.0}),
    _result("slow", [9.0, 9.0, 9.0], facts={"flops": 2.0}),
    _result("fast", [2.5, 5.0, 3.0], facts={"flops": 6.0}),
]


@pytest.mark.parametrize(
    ("promise", "rows", "words"),
    [
        (_PROMISE, [_result("a", [0.5, 0.6]), _result("b", [1.0, 1.0])], ": kept"),
        (_PROMISE, [_result("a", [2.5, 2.6]), _result("b", [1.0, 1.0])], ": BROKEN"),
        (_PROMISE, [_result("a", [0.5, 2.0]), _result("b", [1.0, 1.0])], ": UNCLEAR"),
        (_PROMISE, [_result("a", [1.0])], "NOT MEASURED"),
        (results.Promise("a", 1.0), [_result("a", [0.5], [_LOUD])], "foreign load"),
        (
            results.Promise("a", 9.0),
            _ROWS,
            "promised: a seconds <= 9; measured 3: kept",
        ),
        (results.Promise("a", 1.0, ("slow", "fast")), _ROWS, "measured 0.8 of fast's"),
        (results.Promise("a", 1.0, ("slow", "fast"), "flops"), _ROWS, "1.5 of slow's"),
        (results.Promise("a", 1.0, "fast", "peak MiB"), _ROWS, "NOT MEASURED"),
    ],
)
def test_verdict_looks_at_quartiles_bases_and_load(promise, rows, words):
    assert words in results.verdict(promise, rows)


@pytest.mark.parametrize(
    ("exponents", "words"),
    [([1.9, 2.0, 1.8], "measured 1.9: kept"), ([2.9, 3.0, 2.8], "2.9: BROKEN")],
)
def test_growth_is_the_exponent_of_a_power(exponents, words):
    sizes = {"small": 10, "middle": 20, "large": 80}
    rows = [_result(k, [3.0 * x**e for e in exponents]) for k, x in sizes.items()]
    assert words in results.verdict(results.Growth(sizes, 2.1), rows)
    assert "NOT MEASURED" in results.verdict(results.Growth(sizes, 2.1), rows[1:])
