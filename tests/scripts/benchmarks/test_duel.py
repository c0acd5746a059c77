"""A duel between tiny contenders written for the purpose, and what workers measure."""

import os
import pathlib
import subprocess
import sys

import pytest

from scripts.benchmarks import duel, worker

_MODULE = '''
"""A contender that writes down its turns."""
import os, sys
from scripts.benchmarks import worker

def prepare(name, log, fails=""):
    if fails == "missing":
        import no_such_package.within
    if fails == "prepare":
        raise ValueError("cannot be prepared")
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
    return worker.Program(
        run, reset, units=10, facts={"kind": name}, finish=lambda: {"turns": turns}
    )
'''


def test_contenders_take_turns_and_one_that_fails_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "a_contender.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(duel, "_wait_for_quiet", lambda: None)
    log = tmp_path / "log"
    fails = {"a": "", "b": "", "c": "late", "d": "missing", "e": "prepare"}
    contenders = [
        duel.Contender(name, "a_contender", {"name": name, "log": str(log), "fails": x})
        for name, x in fails.items()
    ]
    results = duel.duel(contenders, rounds=3, retries=0, with_memory=True)
    # First the warm-up; then an order that turns round.
    assert log.read_text().startswith("abc" + "abc" + "cba" + "ab")
    for name, result in zip("ab", results[:2], strict=True):
        # Seconds are per unit of work, and what `run` returned.
        assert [sample.seconds for sample in result.samples] == [2.0, 3.0, 4.0]
        assert (result.facts["kind"], result.facts["turns"]) == (name, 4)
        assert result.facts["peak MiB"] is None or result.facts["peak MiB"] < 50
        assert not result.fault
    late, missing, unprepared = results[2:]
    assert late.fault == "ended with status 9: out of memory"
    assert (len(late.samples), late.missing) == (1, "")
    assert missing.missing == "no_such_package"
    assert unprepared.fault == "ValueError: cannot be prepared"


def test_of_loaded_samples_the_least_disturbed_is_kept():
    everything = float(os.cpu_count())
    tries = [duel.Sample(x, load) for x, load in ((1.0, everything), (3.0, 0.5))]
    assert duel.least_disturbed(tries).seconds == 3.0
    assert not tries[0].is_quiet
    assert duel.Sample(1.0, None).is_quiet  # unknown


def test_only_what_others_work_is_foreign(monkeypatch):
    monkeypatch.setattr(worker.time, "perf_counter", iter([10.0, 14.0]).__next__)
    monkeypatch.setattr(worker, "busy_seconds", iter([100.0, 108.0]).__next__)
    monkeypatch.setattr(worker, "_own_seconds", iter([1.0, 7.0]).__next__)
    answer = worker.measured(worker.Program(lambda: None))
    assert answer == {"seconds": 4.0, "processor_seconds": 6.0, "foreign": 0.5}


# In a process of its own: afterwards that gives back memory at once, and is slow.
_PEAKS = """
from concurrent import futures
from scripts.benchmarks import worker

def peak(call, size):
    # Written to, so that it is really there.
    program = worker.Program(lambda: call(lambda: bytearray(b"x") * size) and None)
    for _ in range(3):
        program.run()
    print(worker.peak_bytes(program) / size)

with futures.ThreadPoolExecutor(1) as threads:
    peak(lambda run: threads.submit(run).result(), 24 * 2**20)
for size in (64 * 2**20, 32 * 2**20):
    peak(lambda run: run(), size)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc"
)
def test_peak_of_memory_counts_what_is_given_back_before_the_end():
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS],
        cwd=pathlib.Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    # What a thread keeps of earlier runs counts too, and so does the smaller one after
    # the larger.
    shares = [float(line) for line in done.stdout.splitlines()]
    assert len(shares) == 3
    assert all(0.9 < share < 1.5 for share in shares), shares
