"""Duels between tiny contenders written for the purpose."""

import os

import pytest

from scripts import duel

_MODULE = '''
"""A contender that writes down its turns."""
import os, sys
from scripts import duel_worker

def prepare(name, log, fails="", busy=()):
    if fails == "missing":
        import no_such_package.within
    if fails == "incomplete":
        import scripts.no_such_module
    if fails == "prepare":
        raise ValueError("cannot be prepared")
    if busy:  # what /proc/stat says before and after each sample
        clock = iter(busy)
        duel_worker.busy_seconds = lambda: next(clock)
        duel_worker._own_seconds = lambda: 0.0
    turns = 0
    def reset():
        nonlocal turns
        turns += 1
    def run():
        print("noise on standard output")
        with open(log, "a") as file:
            file.write(name)
        if fails == "late" and turns == 3:
            print("out of memory", file=sys.stderr)
            sys.stderr.flush()
            os._exit(9)
        return 10.0 * turns
    return duel_worker.Program(
        run, reset, units=10, facts={"kind": name}, finish=lambda: {"turns": turns}
    )
'''


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The file in which contenders write down their turns."""
    (tmp_path / "a_contender.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(duel, "_wait_for_quiet", lambda: None)
    return tmp_path / "log"


def _contender(name, log, **options):
    options = {"name": name, "log": str(log), **options}
    return duel.Contender(name, "a_contender", options)


def test_contenders_take_turns_in_an_order_that_reverses(log):
    contenders = [_contender(name, log) for name in "abc"]
    results = duel.duel(contenders, rounds=3, retries=0)
    assert log.read_text() == "abc" + "abc" + "cba" + "abc"  # first, the warm-up
    assert [result.name for result in results] == ["a", "b", "c"]
    for result in results:
        # The time is per unit of work, and what `run` returned.
        assert [sample.seconds for sample in result.samples] == [2.0, 3.0, 4.0]
        assert result.facts == {"kind": result.name, "turns": 4}
        assert result.units == 10
        assert not result.fault


def test_a_missing_package_is_named_and_the_others_go_on(log):
    contenders = [_contender("a", log, fails="missing"), _contender("b", log)]
    absent, present = duel.duel(contenders, rounds=1, retries=0)
    assert absent.missing == "no_such_package"
    assert absent.fault and not absent.samples
    assert len(present.samples) == 1 and not present.fault


def test_a_module_missing_from_a_package_that_is_there_is_a_fault(log):
    (result,) = duel.duel([_contender("a", log, fails="incomplete")], rounds=1)
    assert "no_such_module" in result.fault and not result.missing


def test_a_package_missing_at_the_top_of_a_module_is_named(log):
    (log.parent / "another.py").write_text("import no_such_package")
    (result,) = duel.duel([duel.Contender("a", "another", {})], rounds=1)
    assert result.missing == "no_such_package"


def test_a_contender_that_fails_is_left_alone(log):
    contenders = [
        _contender("a", log, fails="prepare"),
        _contender("b", log, fails="late"),
        _contender("c", log),
    ]
    first, late, fine = duel.duel(contenders, rounds=4, retries=0)
    assert first.fault == "ValueError: cannot be prepared" and not first.missing
    assert late.fault == "ended with status 9: out of memory"
    assert len(fine.samples) == 4 and not fine.fault


def test_a_loaded_sample_is_taken_again_and_the_quietest_kept(log):
    everything = 1e6 * os.cpu_count()
    loads = [everything, everything / 1000, everything / 2]
    busy = [clock for load in loads for clock in (0.0, load)]
    (result,) = duel.duel([_contender("a", log, busy=busy)], rounds=1, retries=2)
    assert log.read_text() == "aaaa"
    assert [sample.seconds for sample in result.samples] == [3.0]
    assert not result.samples[0].is_quiet


def test_a_quiet_sample_is_not_taken_again(log):
    busy = [0.0] * 4
    (result,) = duel.duel([_contender("a", log, busy=busy)], rounds=2, retries=2)
    assert log.read_text() == "aaa"
    assert [sample.is_quiet for sample in result.samples] == [True, True]


def test_a_duel_that_takes_too_long_stops_after_three_rounds(log):
    said = []
    (result,) = duel.duel(
        [_contender("a", log)], rounds=9, retries=0, longest=0.0, say=said.append
    )
    assert len(result.samples) == 3
    assert said[-1] == "stopped after 3 of 9 rounds: it took too long"


def test_memory_is_measured_when_asked_for(log):
    (without,) = duel.duel([_contender("a", log)], rounds=1)
    assert "peak MiB" not in without.facts
    (result,) = duel.duel([_contender("a", log)], rounds=1, with_memory=True)
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert 0 <= result.facts["peak MiB"] < 50


def test_contenders_get_devices_and_threads_of_their_own_choice(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    environment = duel._environment()
    assert "OMP_NUM_THREADS" not in environment
    assert "JAX_NUM_CPU_DEVICES" not in environment
