"""The lock of a run's folder: one process trains in it at a time.

The kernel holds the lock (`flock`) and releases it when the process ends, also by a
kill. The content of the file only names the owner, for messages.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mha_haiku.core.checks import ConfigError

_logger = logging.getLogger("mha_haiku")


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Holds a lock on `path.parent` while entered; ConfigError if it is in use."""
    while (descriptor := _locked(path)) is None:
        pass
    before, host = _owner(descriptor), socket.gethostname()
    if before is not None and before["host"] != host:
        _logger.warning(
            f"{path} is of process {before['pid']} on {before['host']}, "
            "which ended without releasing it; it is taken over."
        )
    text = json.dumps({"pid": os.getpid(), "host": host}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)
    try:
        yield
    finally:
        # Removed while locked, so that it cannot be another process's file.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path) -> int | None:
    """Opens and locks the file; returns None if another process has removed it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except BlockingIOError:
        owner = _owner(descriptor) or {"pid": "unknown", "host": "this host"}
        os.close(descriptor)
        raise ConfigError(
            f"workdir {path.parent} is in use: process {owner['pid']} on "
            f"{owner['host']} trains in it.\n"
            "Wait for its end, or take another workdir."
        ) from None
    except FileNotFoundError:  # removed, and not there again
        pass
    except OSError as error:  # a file system without locks
        _logger.warning(
            f"{path.parent} cannot be locked ({error.strerror}): make sure that only "
            "one process trains in it."
        )
        return descriptor
    os.close(descriptor)
    return None


def _owner(descriptor) -> dict | None:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
