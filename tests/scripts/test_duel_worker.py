"""What a worker measures of itself and of the others."""

import os
import pathlib
import subprocess
import sys

import pytest

from scripts import duel_worker

_needs_proc = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc"
)


def _program(run):
    return duel_worker.Program(run)


def test_only_what_others_work_is_foreign(monkeypatch):
    monkeypatch.setattr(duel_worker.time, "perf_counter", iter([10.0, 14.0]).__next__)
    monkeypatch.setattr(duel_worker, "busy_seconds", iter([100.0, 108.0]).__next__)
    monkeypatch.setattr(duel_worker, "_own_seconds", iter([1.0, 7.0]).__next__)
    answer = duel_worker.measured(_program(lambda: None))
    assert answer == {"seconds": 4.0, "processor_seconds": 6.0, "foreign": 0.5}


def test_own_work_that_the_clock_of_the_machine_misses_is_not_negative(monkeypatch):
    monkeypatch.setattr(duel_worker, "busy_seconds", iter([0.0, 0.0]).__next__)
    monkeypatch.setattr(duel_worker, "_own_seconds", iter([0.0, 1.0]).__next__)
    assert duel_worker.measured(_program(lambda: None))["foreign"] == 0.0


def test_a_run_may_say_itself_how_long_it_took():
    assert duel_worker.measured(_program(lambda: 7.0))["seconds"] == 7.0


def test_load_is_unknown_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(duel_worker, "busy_seconds", lambda: None)
    assert duel_worker.measured(_program(lambda: None))["foreign"] is None


@_needs_proc
def test_busy_seconds_grow_with_work():
    before, own = duel_worker.busy_seconds(), duel_worker._own_seconds()
    while duel_worker._own_seconds() < own + 0.1:
        pass
    assert duel_worker.busy_seconds() - before >= 0.05


# In a process of its own: afterwards that gives back memory at once, and is slow.
_PEAKS = """
from concurrent import futures
from scripts import duel_worker

def peak(call, size):
    # Written to, so that it is really there.
    program = duel_worker.Program(lambda: call(lambda: bytearray(b"x") * size) and None)
    for _ in range(3):
        program.run()
    print(duel_worker.peak_bytes(program) / size)

with futures.ThreadPoolExecutor(1) as threads:
    peak(lambda run: threads.submit(run).result(), 24 * 2**20)
for size in (64 * 2**20, 32 * 2**20):
    peak(lambda run: run(), size)
"""


@_needs_proc
def test_peak_of_memory_counts_what_is_given_back_before_the_end():
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS],
        cwd=pathlib.Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    # What a thread keeps of earlier runs counts too, and so does the smaller one after
    # the larger.
    shares = [float(line) for line in done.stdout.splitlines()]
    assert len(shares) == 3
    assert all(0.9 < share < 1.5 for share in shares), shares
