"""The worker's side of a duel: a process that runs one contender on request.

A contender is a module with a function `prepare`, which makes a `Program` from the
contender's options. The two sides exchange one line of JSON at a time over the worker's
standard input and output; what the contender itself prints goes to standard error.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import resource
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# From how many bytes on the C library gives memory back at once; and options of glibc's
# `mallopt` for it: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_LARGE = 2**16
_GIVE_BACK = (-1, -3)

_NO_FACTS: Mapping[str, Any] = types.MappingProxyType({})


class Program(NamedTuple):
    """The program of a contender, ready to run."""

    # Does all the work of one sample and waits for its end. Returns the seconds that
    # count if they are not the elapsed time, else None.
    run: Callable[[], float | None]
    reset: Callable[[], None] = lambda: None  # called before each run, not timed
    units: int = 1  # of work in a run: steps, calls
    facts: Mapping[str, Any] = _NO_FACTS  # what is known before it runs
    finish: Callable[[], Mapping[str, Any]] = dict  # what is known after the last run
    warm_up: int = 1  # runs before the first that counts


def serve(module: str) -> None:
    """Answers the duel until it closes the worker's standard input.

    Args:
      module: The contender's; imported when the duel asks for its program.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["request"] == "prepare":
                program = importlib.import_module(module).prepare(**message["options"])
                for _ in range(program.warm_up):
                    program.reset()
                    program.run()
                answer = {"units": program.units, "facts": dict(program.facts)}
            elif message["request"] == "sample":
                answer = measured(program)
            elif message["request"] == "memory":
                answer = {"peak_bytes": peak_bytes(program)}
            else:
                answer = {"facts": dict(program.finish())}
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            is_there = not package or importlib.util.find_spec(package) is not None
            answer = {"missing": "" if is_there else package, "fault": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"fault": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def measured(program: Program) -> dict[str, float | None]:
    """Runs a program once.

    Returns:
      "seconds" of the run; "processor_seconds" of this process and those it started;
      and "foreign": how many processors, on average, others kept busy meanwhile, None
      where the system does not tell.
    """
    program.reset()
    busy, own = busy_seconds(), _own_seconds()
    before = time.perf_counter()
    seconds = program.run()
    elapsed = time.perf_counter() - before
    worked = _own_seconds() - own
    foreign = None
    if busy is not None:
        foreign = max(0.0, busy_seconds() - busy - worked) / elapsed
    return {
        "seconds": elapsed if seconds is None else seconds,
        "processor_seconds": worked,
        "foreign": foreign,
    }


def peak_bytes(program: Program) -> int | None:
    """Runs a program twice; returns by how much the second run raised the memory.

    None if the system does not tell. Unused memory of the process is given back first:
    otherwise the run would seem to need nothing. Threads give back their memory in the
    first run. All this makes later runs slow, so no time is measured after it.
    """
    status, marks = pathlib.Path("/proc/self/status"), "/proc/self/clear_refs"
    if not os.access(marks, os.W_OK):
        return None
    for option in _GIVE_BACK:
        _c_library("mallopt", option, _LARGE)
    program.reset()
    program.run()
    program.reset()
    gc.collect()
    _c_library("malloc_trim", 0)
    pathlib.Path(marks).write_text("5")  # forgets the highest mark so far
    before = _field(status, "VmRSS:")
    program.run()
    return 1024 * (_field(status, "VmHWM:") - before)


def busy_seconds() -> float | None:
    """Returns the processor seconds that the whole machine has worked since its start.

    Time that another guest of the same host took counts as work. None without
    /proc/stat.
    """
    try:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = ticks
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / os.sysconf("SC_CLK_TCK")


def _c_library(name: str, *arguments: int) -> None:
    """Calls a function of the C library, if it exists."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


def _own_seconds() -> float:
    """Returns processor seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _field(path, name) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
