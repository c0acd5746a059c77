"""What is said of promises, on samples made up so that the answers are known."""

import os

import pytest

from scripts import duel, duel_promises

_LOUD = float(os.cpu_count())  # others keep every processor busy


def _result(name, seconds, foreign=None, **fields):
    foreign = foreign or [0.0] * len(seconds)
    samples = [duel.Sample(*pair) for pair in zip(seconds, foreign, strict=True)]
    return duel.Result(name, samples, **fields)


@pytest.mark.parametrize(
    "seconds, outcome",
    [
        ([0.5, 0.6, 0.7], ": kept"),
        ([2.5, 2.6, 2.7], ": BROKEN"),
        ([0.5, 0.9, 2.0], ": UNCLEAR"),
    ],
)
def test_verdict_looks_at_the_quartiles(seconds, outcome):
    promise = duel_promises.Promise("a", 1.0, "b", aim=0.5)
    results = [_result("a", seconds), _result("b", [1.0] * 3)]
    line = duel_promises.verdict(promise, results)
    assert line.startswith("promised: a seconds <= 1 of b's (aim: 0.5); measured")
    assert outcome in line


def test_verdict_on_a_limit_of_its_own_and_on_a_fact():
    results = [
        _result("a", [2.0], facts={"flops": 30}),
        _result("b", [1.0], facts={"flops": 20}),
    ]
    verdict = duel_promises.verdict(duel_promises.Promise("a", 2.5), results)
    assert verdict == "promised: a seconds <= 2.5; measured 2: kept"
    verdict = duel_promises.verdict(
        duel_promises.Promise("a", 1.0, "b", "flops"), results
    )
    assert "a flops <= 1 of b's; measured 1.5: BROKEN" in verdict


@pytest.mark.parametrize("there", ["a", "b"])
def test_what_has_no_base_or_no_samples_is_not_measured(there):
    results = [_result(there, [1.0]), duel.Result("ab".replace(there, ""))]
    verdict = duel_promises.verdict(duel_promises.Promise("a", 1.0, "b"), results)
    assert verdict.endswith("NOT MEASURED")


@pytest.mark.parametrize("facts", [{}, {"peak MiB": None}, {"peak MiB": 0.0}])
def test_a_fact_that_the_base_lacks_is_not_measured(facts):
    results = [_result("a", [1.0], facts={"peak MiB": 3.0})]
    results.append(_result("b", [1.0], facts=facts))
    promise = duel_promises.Promise("a", 1.0, "b", "peak MiB")
    assert duel_promises.verdict(promise, results).endswith("NOT MEASURED")


@pytest.mark.parametrize("limit", [0.1, 1.0])
def test_nothing_is_kept_or_broken_on_a_loaded_machine(limit):
    promise = duel_promises.Promise("a", limit)
    verdict = duel_promises.verdict(promise, [_result("a", [0.5], [_LOUD])])
    assert "measured 0.5: UNCLEAR under foreign load" in verdict


def test_of_several_bases_the_fastest_counts():
    results = [
        _result("a", [2.0, 4.0, 3.0]),
        _result("slow", [9.0, 9.0, 9.0]),
        _result("fast", [2.5, 5.0, 3.0]),
        _result("lucky_once", [1.0, 8.0, 8.0]),
    ]
    promise = duel_promises.Promise("a", 1.0, ("slow", "fast", "lucky_once"), aim=0.5)
    assert duel_promises.verdict(promise, results) == (
        "promised: a seconds <= 1 of the least of slow, fast, lucky_once (aim: 0.5); "
        "measured 0.8 of fast's: kept"
    )


def test_of_several_bases_the_smallest_fact_counts():
    results = [
        _result("a", [1.0], facts={"peak MiB": 3.0}),
        _result("fast", [1.0], facts={"peak MiB": 6.0}),
        _result("small", [2.0], facts={"peak MiB": 2.0}),
    ]
    promise = duel_promises.Promise("a", 1.0, ("fast", "small"), "peak MiB")
    assert "measured 1.5 of small's: BROKEN" in duel_promises.verdict(promise, results)


def test_without_one_of_several_bases_nobody_knows_the_fastest():
    results = [_result("a", [1.0]), _result("b", [1.0]), duel.Result("c")]
    promise = duel_promises.Promise("a", 1.0, ("b", "c"))
    assert duel_promises.verdict(promise, results).endswith("NOT MEASURED")


_SIZES = {"small": 10, "middle": 20, "large": 80}


def _growing(exponents, foreign=None):
    """Returns results whose seconds grow with another power in each round."""
    return [
        _result(name, [3.0 * size**exponent for exponent in exponents], foreign)
        for name, size in _SIZES.items()
    ]


@pytest.mark.parametrize(
    "exponents, outcome",
    [
        ([1.9, 2.0, 1.8], "measured 1.9: kept"),
        ([2.9, 3.0, 2.8], "measured 2.9: BROKEN"),
        ([1.9, 2.0, 2.9], "measured 2: UNCLEAR, the quartiles"),
    ],
)
def test_growth_is_the_exponent_of_a_power(exponents, outcome):
    promise = duel_promises.Growth(_SIZES, 2.1)
    verdict = duel_promises.verdict(promise, _growing(exponents))
    assert verdict.startswith("promised: exponent of seconds in size, 10 to 80, <= 2.1")
    assert outcome in verdict


def test_growth_counts_rounds_in_which_nobody_was_loaded():
    results = _growing([2.0, 2.0, 5.0])
    loaded = results[1].samples[2]._replace(foreign=_LOUD)
    results[1].samples[2] = loaded
    promise = duel_promises.Growth(_SIZES, 2.1)
    assert "measured 2: kept" in duel_promises.verdict(promise, results)


def test_growth_under_load_is_not_judged():
    results = _growing([1.0], [_LOUD])
    verdict = duel_promises.verdict(duel_promises.Growth(_SIZES, 2.1), results)
    assert "measured 1: UNCLEAR under foreign load" in verdict


def test_growth_needs_every_size():
    promise = duel_promises.Growth(_SIZES, 2.1)
    verdict = duel_promises.verdict(promise, _growing([1.0])[1:])
    assert verdict.endswith("NOT MEASURED")
