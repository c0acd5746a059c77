"""Several processes that run the same program: they connect, agree and share results.

All processes must call these functions in the same order. With one process they return
at once. Only the first process reads the folder of a run (`first_does`) and writes it
(`runs.loop` and `runs.files`).
"""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mha_haiku.core import checks

_JOIN_SECONDS = 60  # until all processes have come
_HEARTBEAT_SECONDS = 10  # without a heartbeat until a process counts as dead
_LEAVE_SECONDS = 60  # for which the first to end waits for the others


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connects to the other processes; call it before any other function of JAX.

    `coordinator` is "host:port" of process 0; by default all three come from Slurm,
    Open MPI or the TPU pod.

    Raises:
      ConfigError: If JAX cannot connect, or the other processes do not come.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=_JOIN_SECONDS,
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

    A ConfigError of the first process is raised on all; after any other error there,
    the others raise RuntimeError.
    """
    if _is_alone():
        return function()
    outcome, failure = None, None
    if is_first():
        try:
            outcome = {"value": function()}
        except checks.ConfigError as error:
            outcome, failure = {"mistake": str(error)}, error
        except Exception as error:
            outcome, failure = {"fault": f"{type(error).__name__}: {error}"}, error
    content = np.frombuffer(pickle.dumps(outcome), np.uint8)
    # As bytes, since JAX has no int64.
    size = _of_first(np.frombuffer(np.int64(content.size).tobytes(), np.uint8))
    size = int(np.frombuffer(np.asarray(size).tobytes(), np.int64)[0])
    content = _of_first(np.resize(content, size))
    if failure is not None:
        raise failure
    outcome = pickle.loads(np.asarray(content).tobytes())
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


def _gathered(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array))


def _of_first(tree: Any) -> Any:
    from jax.experimental import multihost_utils

    return multihost_utils.broadcast_one_to_all(tree)
