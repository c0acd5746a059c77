"""Compares programs on a machine that others may be using too.

Every contender is a separate process, and they take turns: in each round each runs
once, in an order that is reversed every time, so that drifts over minutes affect all
equally. A sample with much foreign load is repeated, up to a limit; of the tries the
one with the least foreign load is kept, never the fastest. See `worker.py` for the
other side and `results.py` for the statistics.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.benchmarks import worker

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# These would give a contender other devices, ranks or threads than it requests.
_UNWANTED = ("JAX_NUM_CPU_DEVICES", "JAX_NUMPY_RANK_PROMOTION", "OMP_NUM_THREADS")

_SERVE = "import sys; from scripts.benchmarks import worker; worker.serve(sys.argv[1])"

# Share of the machine's processors that others may use during a quiet sample.
_QUIET_SHARE = 0.1

# Rounds that are taken however long they last.
_FEWEST_ROUNDS = 3


class Contender(NamedTuple):
    """A program to compare."""

    name: str
    module: str  # with a `prepare`; see `worker.py`
    options: Mapping[str, Any]  # of the module's `prepare`; JSON


class Sample(NamedTuple):
    """One turn of one contender."""

    seconds: float  # per unit of work
    foreign: float | None  # processors that others kept busy, if known
    processor_seconds: float = 0.0  # of all its threads, per unit of work

    @property
    def is_quiet(self) -> bool:
        """Whether the machine had little foreign load, as far as is known."""
        return (self.foreign or 0.0) <= _QUIET_SHARE * (os.cpu_count() or 1)


@dataclasses.dataclass
class Result:
    """The samples of a contender."""

    name: str
    samples: list[Sample] = dataclasses.field(default_factory=list)  # one per round
    units: int = 1  # of work in a sample
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    missing: str = ""  # the package for want of which it did not take part
    fault: str = ""  # why it did not come to the end


def duel(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    retries: int = 2,
    longest: float = 120.0,
    with_memory: bool = False,
) -> list[Result]:
    """Lets contenders take turns.

    Args:
      contenders: The contenders; all are prepared before the first round.
      rounds: Number of turns of each.
      retries: Maximum number of repetitions of a sample that was not quiet.
      longest: Seconds of rounds after which no sample is repeated, and no round begins,
        except the first three.
      with_memory: Whether each runs once more, at the end, for the fact "peak MiB": the
        rise of its memory above the memory before.

    Returns:
      A result for each contender; one with `fault` has fewer samples, or none.
    """
    results = [Result(contender.name) for contender in contenders]
    with contextlib.ExitStack() as stack:
        workers = []
        for contender, result in zip(contenders, results, strict=True):
            worker = stack.enter_context(_Worker(contender, result))
            workers.append(worker)
            worker.prepare()
        until = time.perf_counter() + longest
        for i in range(rounds):
            if i >= _FEWEST_ROUNDS and time.perf_counter() > until:
                break
            for worker in workers[:: -1 if i % 2 else 1]:
                worker.take_turn(0 if time.perf_counter() > until else retries)
        for worker in workers:
            worker.finish(with_memory)
    return results


class _Worker:
    """A contender's process; once it has failed it is left alone."""

    def __init__(self, contender: Contender, result: Result):
        self._contender = contender
        self._result = result

    def __enter__(self):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, self._contender.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def prepare(self) -> None:
        answer = self._ask("prepare", options=dict(self._contender.options))
        if answer is not None:
            self._result.units = answer["units"]
            self._result.facts |= answer["facts"]

    def take_turn(self, retries: int) -> None:
        tries = []
        for _ in range(1 + retries):
            _wait_for_quiet()
            answer = self._ask("sample")
            if answer is None:
                return
            seconds, processor_seconds = (
                answer[name] / self._result.units
                for name in ("seconds", "processor_seconds")
            )
            tries.append(Sample(seconds, answer["foreign"], processor_seconds))
            if tries[-1].is_quiet:
                break
        self._result.samples.append(least_disturbed(tries))

    def finish(self, with_memory: bool) -> None:
        if (answer := self._ask("finish")) is not None:
            self._result.facts |= answer["facts"]
        if with_memory and (answer := self._ask("memory")) is not None:
            peak = answer["peak_bytes"]
            self._result.facts["peak MiB"] = peak and round(peak / 2**20, 1)

    def _ask(self, request: str, **details: Any) -> dict[str, Any] | None:
        """Returns the worker's answer; None, with the fault noted, if there is none."""
        if self._result.fault:
            return None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(
                json.dumps({"request": request, **details}),
                file=self._process.stdin,
                flush=True,
            )
            line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"fault": self._last_words()}
        if "fault" not in answer:
            return answer
        self._result.fault = answer["fault"]
        self._result.missing = answer.get("missing", "")
        return None

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().splitlines() or ["it said nothing"]
        return f"ended with status {status}: {lines[-1]}"


def least_disturbed(tries: Sequence[Sample]) -> Sample:
    """Returns the sample with the least foreign load, the first of several."""
    return min(tries, key=lambda sample: sample.foreign or 0.0)


def _wait_for_quiet(longest: float = 0.5, interval: float = 0.1) -> None:
    """Waits until the machine rests for a moment, but not for long."""
    until = time.perf_counter() + longest
    while time.perf_counter() < until:
        busy, before = worker.busy_seconds(), time.perf_counter()
        time.sleep(interval)
        if busy is None:
            return
        load = (worker.busy_seconds() - busy) / (time.perf_counter() - before)
        if Sample(0.0, load).is_quiet:
            return


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _UNWANTED}
    environment.setdefault("JAX_PLATFORMS", "cpu")
    inherited = environment.get("PYTHONPATH")
    paths = [str(_REPOSITORY), *([inherited] if inherited else [])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
