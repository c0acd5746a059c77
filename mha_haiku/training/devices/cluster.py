"""Several processes that run the same program: they connect, agree and share results.

All processes must call these functions in the same order. With one process they return
at once. Only the first process reads the folder of a run (`first_does`) and writes it
(`runs.loop` and `runs.files`).
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks

_HEARTBEAT_SECONDS = 10  # without a heartbeat until a process counts as dead
_LEAVE_SECONDS = 60  # for which the first to end waits for the others


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60.0,
) -> None:
    """Connects to the other processes; call it before any other function of JAX.

    `coordinator` is "host:port" of process 0; by default all three come from Slurm,
    Open MPI or the TPU pod. If the processes do not all come in `timeout` seconds, this
    one ends with status 2 and two lines on stderr; JAX would abort with a stack trace.

    Raises:
      ConfigError: If one of the three is passed without the others, or does not fit,
        or JAX cannot connect.
    """
    _check(coordinator, num_processes, process_id)
    where = coordinator or "the cluster's coordinator"
    met = threading.Event()

    def watch():
        if not met.wait(timeout):
            print(
                f"error: not all processes met at {where} within {timeout:g} s; this "
                f"is process {'?' if process_id is None else process_id}.\n"
                "Start all of them, process 0 on the coordinator's host, with the same "
                "coordinator and number of processes.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(2)

    threading.Thread(target=watch, daemon=True, name="join").start()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=int(timeout) + 600,  # later than `watch`
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_LEAVE_SECONDS,
        )
        jax.devices()
    except (RuntimeError, ValueError) as error:
        raise checks.ConfigError(
            "--distributed cannot connect to other processes: "
            f"{' '.join(str(error).split())}\n"
            "Outside Slurm, Open MPI and TPU pods give --coordinator=host:port, "
            "--num_processes and --process_id."
        ) from error
    finally:
        met.set()


def is_first() -> bool:
    """Checks whether this process reads and writes the run's folder."""
    return jax.process_index() == 0


def agree(stops: bool, steps: int) -> tuple[bool, int]:
    """Agrees between processes: whether any wants to stop, and their fewest steps."""
    if _is_alone():
        return stops, steps
    wishes = _gathered(np.array([stops, min(steps, 2**31 - 1)], np.int32))
    return bool(wishes[:, 0].any()), int(wishes[:, 1].min())


def first_does(function: Callable[[], Any]) -> Any:
    """Runs `function()` on the first process; returns its result on all.

    The result is a JSON value that may have NumPy arrays in it. A ConfigError of the
    first process is raised on all; after any other error there, the others raise
    RuntimeError.
    """
    if _is_alone():
        return function()
    outcome, failure, arrays, blanks = {}, None, [], []
    if is_first():
        try:
            outcome = {"value": function()}
        except checks.ConfigError as error:
            outcome, failure = {"mistake": str(error)}, error
        except Exception as error:
            outcome, failure = {"fault": f"{type(error).__name__}: {error}"}, error

    def described(array: np.ndarray) -> dict[str, Any]:
        arrays.append(array)
        return {"dtype": str(array.dtype), "shape": array.shape}

    def blank(value: dict[str, Any]) -> Any:
        if value.keys() != {"dtype", "shape"}:
            return value
        blanks.append(np.empty(value["shape"], jax.numpy.dtype(value["dtype"])))
        return blanks[-1]

    text = np.frombuffer(json.dumps(outcome, default=described).encode(), np.uint8)
    size = int(_of_first(np.int32(text.size)))
    text = _of_first(np.resize(text, size))
    outcome = json.loads(np.asarray(text).tobytes(), object_hook=blank)
    # As bytes, so that the broadcast changes no bit.
    contents = [np.frombuffer(x.tobytes(), np.uint8) for x in arrays or blanks]
    contents = _of_first(contents) if blanks else []
    for array, content in zip(blanks, contents, strict=True):
        content = np.frombuffer(np.asarray(content).tobytes(), array.dtype)
        array[...] = content.reshape(array.shape)
    if failure is not None:
        raise failure
    if "mistake" in outcome:
        raise checks.ConfigError(outcome["mistake"])
    if "fault" in outcome:
        raise RuntimeError(f"the first process failed: {outcome['fault']}")
    return outcome["value"]


def leave() -> bool:
    """Disconnects from the other processes; returns whether this is the first."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    return is_first()


def end(status: int) -> None:
    """Ends a failed process at once; Python's own exit would wait for the others."""
    if status and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_alone() -> bool:
    """Checks whether there are no other processes, or they have been left."""
    return jax.process_count() == 1 or not jax.distributed.is_initialized()


def _check(coordinator: Any, num_processes: Any, process_id: int | None) -> None:
    arguments = [coordinator, num_processes, process_id]
    if arguments == [None] * 3:
        return
    if None in arguments:
        raise checks.ConfigError(
            "--coordinator, --num_processes and --process_id go together, got "
            f"{coordinator}, {num_processes} and {process_id}."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise checks.ConfigError(
            f"--coordinator must be host:port with a port from 1 to 65535, got "
            f"{coordinator!r}."
        )
    with checks.user_mistakes():
        checks.positive_integer("--num_processes", num_processes)
        checks.integer_in("--process_id", process_id, 0, num_processes - 1)


def _gathered(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))


def _of_first(tree: Any) -> Any:
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(tree)
