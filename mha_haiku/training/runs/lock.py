"""The lock of a run's folder: one process trains in it at a time.

The kernel holds the lock (`flock`) and releases it when the process ends, also by a
kill. The content of the file only names the owner, for messages.
"""

import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from mha_haiku.core.checks import ConfigError

_logger = logging.getLogger("mha_haiku")


class Lock:
    """A lock on `path.parent`, held while entered.

    Raises:
      ConfigError: On entering, if another process holds it; it names its id and host.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> "Lock":
        while self._descriptor is None:
            self._descriptor = self._try()
        before = _owner(self._descriptor)
        host = socket.gethostname()
        if before is not None and before["host"] != host:
            _logger.warning(
                f"{self._path} is of process {before['pid']} on {before['host']}, "
                f"which left it without letting go; it is taken over."
            )
        os.ftruncate(self._descriptor, 0)
        text = json.dumps({"pid": os.getpid(), "host": host})
        os.pwrite(self._descriptor, text.encode(), 0)
        return self

    def __exit__(self, *exception: object) -> None:
        # Removed while it is locked, so that it cannot be another process's file.
        self._path.unlink(missing_ok=True)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _try(self) -> int | None:
        """Tries to lock the file; None where it was removed in between."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(descriptor, self._path):
                return descriptor
        except BlockingIOError:
            owner = _owner(descriptor) or {"pid": "unknown", "host": "this host"}
            os.close(descriptor)
            raise ConfigError(
                f"workdir {self._path.parent} is in use: process {owner['pid']} on "
                f"{owner['host']} trains in it.\n"
                "Let it end, or take another workdir."
            ) from None
        except OSError as error:  # a file system without locks
            _logger.warning(
                f"{self._path.parent} cannot be locked ({error.strerror}): see to it "
                f"that only one process trains in it."
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


def _is_same(descriptor, path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
