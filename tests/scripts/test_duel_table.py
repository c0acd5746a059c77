"""Statistics of duels, on samples made up so that the answers are known."""

import os

from scripts import duel, duel_table

_LOUD = float(os.cpu_count())  # others keep every processor busy


def _result(name, seconds, foreign=None, **fields):
    foreign = foreign or [0.0] * len(seconds)
    samples = [duel.Sample(*pair) for pair in zip(seconds, foreign, strict=True)]
    return duel.Result(name, samples, **fields)


def test_spread_is_median_and_quartiles():
    spread = duel_table.seconds(_result("a", [5.0, 1.0, 4.0, 2.0, 3.0]))
    assert spread == (2.0, 3.0, 4.0, 5, 5)


def test_one_sample_is_its_own_spread():
    assert duel_table.seconds(_result("a", [2.0])) == (2.0, 2.0, 2.0, 1, 1)


def test_loaded_samples_do_not_count_where_enough_are_quiet():
    result = _result("a", [1.0, 9.0, 1.0, 9.0], [0.0, _LOUD, 0.0, _LOUD])
    assert duel_table.seconds(result) == (1.0, 1.0, 1.0, 2, 4)
    assert duel_table.seconds(result).is_quiet


def test_all_samples_count_where_too_few_are_quiet():
    result = _result("a", [1.0, 9.0, 9.0], [0.0, _LOUD, _LOUD])
    spread = duel_table.seconds(result)
    assert (spread.median, spread.num_quiet, spread.num_all) == (9.0, 1, 3)
    assert not spread.is_quiet


def test_unknown_load_counts_as_quiet():
    assert duel_table.seconds(_result("a", [1.0], [None])).is_quiet


def test_ratio_is_taken_within_rounds():
    # Both slow down alike from round to round; medians would say the same here, but
    # quartiles of a quotient of medians would not.
    mine, base = _result("a", [2.0, 20.0, 6.0]), _result("b", [4.0, 40.0, 12.0])
    assert duel_table.ratio(mine, base) == (0.5, 0.5, 0.5, 3, 3)


def test_ratio_leaves_out_rounds_in_which_either_was_loaded():
    mine = _result("a", [1.0, 9.0, 1.0, 1.0], [0.0, _LOUD, 0.0, 0.0])
    base = _result("b", [2.0, 2.0, 90.0, 2.0], [0.0, 0.0, _LOUD, 0.0])
    assert duel_table.ratio(mine, base) == (0.5, 0.5, 0.5, 2, 4)


def test_a_long_table_is_in_seconds():
    header, row = duel_table.table([_result("a", [7.5])], "", "start")
    assert "  s/start" in header
    assert row.split()[1] == "7.5"


def test_table_shows_times_ratios_and_facts():
    results = [
        _result("mine", [0.001, 0.003, 0.002], facts={"parameters": 1234}),
        _result("base", [0.004] * 3, facts={"parameters": 99, "peak MiB": 3.1}),
        duel.Result("absent", missing="absent", fault="no module"),
    ]
    header, mine, base = duel_table.table(results, "base", "step")
    assert header.split("  ")[0] == "contender"
    assert "ms/step" in header and "steps/s" in header and "time / base" in header
    assert mine.split() == (
        "mine 2 1.5 - 2.5 500 0 0.50 0.38 - 0.62 3/3 1,234 -".split()
    )
    assert base.split() == "base 4 4 - 4 250 0 1.00 1.00 - 1.00 3/3 99 3.1".split()
    assert len(header) >= len(mine) == len(base)


def test_table_marks_what_was_measured_under_load():
    lines = duel_table.table([_result("a", [1.0], [_LOUD])], "", "call")
    assert lines[1].endswith("0/1 !")
    assert lines[2].startswith("! LOADED")


def test_table_without_anyone_says_so():
    results = [duel.Result("a", fault="broken")]
    assert duel_table.table(results, "", "call") == ["(nobody came to the end)"]


def test_troubles_name_who_is_skipped_and_who_failed():
    results = [
        duel.Result("fine"),
        duel.Result("absent", missing="flax", fault="No module named 'flax'"),
        duel.Result("broken", fault="ValueError: x"),
    ]
    skipped, failed = duel_table.troubles(results, "this[that]")
    assert skipped.startswith("SKIPPED absent") and "'flax'" in skipped
    assert "pip install this[that]" in skipped
    assert failed == "FAILED broken: ValueError: x"
