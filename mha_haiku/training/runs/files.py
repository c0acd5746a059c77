"""Files that are written whole or not at all, logs, and the lock of a run's folder.

A log has a JSON object per line. It is only appended to and truncated, never rewritten,
so that a kill loses no line.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mha_haiku.core import arrays, checks
from mha_haiku.core.checks import ConfigError

_logger = logging.getLogger("mha_haiku")
_MOST_BYTES = 2**30  # of a log; a larger file is damage
_MOST_OWNER = 2**12  # bytes of a lock

write = checks.write_file


def write_json(path: str | os.PathLike, contents: Mapping[str, Any]) -> Path:
    """Writes a JSON object; see `write`."""
    return write(path, json.dumps(contents, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object in a JSON file, or None if there is no file."""
    try:
        path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} must be a folder.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    return arrays.read_json(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log, in order; warns of damaged lines, and omits them.

    A last line that a kill cut off is left out without a warning.
    """
    lines = _parse(_read_bytes(path))
    damaged = [str(i) for i, (_, record) in enumerate(lines, start=1) if record is None]
    if damaged:
        listed = ", ".join(damaged[:4]) + ", ..." * (len(damaged) > 4)
        _logger.warning(
            f"{path} is damaged at line{'s' * (len(damaged) > 1)} {listed}: left out."
        )
    return [record for _, record in lines if record is not None]


class LineWriter(contextlib.AbstractContextManager):
    """Appends records to a log, each at once.

    Records that a full disk refuses are kept, and written once there is room again.
    """

    def __init__(self, path: Path, *, last_step: int | None = None):
        """Opens or creates the log; cuts off records of a "step" after `last_step`."""
        self._pending = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = checks.regular_file(path).open("ab", buffering=0)
            content, end = _read_bytes(path), 0
            for place, record in _parse(content):
                step = -1 if record is None else record.get("step", -1)
                if last_step is not None and step > last_step:
                    break
                end = place
            if end < len(content):
                self._file.truncate(end)
            if end and content[end - 1 : end] != b"\n":
                self._pending = b"\n"  # a kill left the last line without it
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        self._pending += json.dumps(record).encode() + b"\n"
        self._write_pending()

    def close(self) -> None:
        self._write_pending()
        self._file.close()

    def _write_pending(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            _logger.warning(
                f"{self._file.name} cannot be written ({error.strerror}); "
                f"{len(self._pending)} bytes wait."
            )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on `path.parent` while entered; ConfigError if it is in use.

    One process trains in a folder at a time. The kernel holds the lock (`flock`) and
    releases it when the process ends, also by a kill. The content of the file only
    names the owner, for messages.
    """
    while (descriptor := _lock(path)) is None:
        pass
    before, host = _owner_in(descriptor), socket.gethostname()
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


def is_lock(path: Path) -> bool:
    """Returns whether a file is missing, or may be what a killed `locked` has left."""
    try:
        content = checks.whole_file(path, _MOST_OWNER)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not content or _owner(content) is not None


def _read_bytes(path: Path) -> bytes:
    try:
        return checks.whole_file(path, _MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _parse(content: bytes) -> list[tuple[int, dict[str, Any] | None]]:
    """Parses lines: the end and the record of each, None if it is damaged."""
    lines, end = [], 0
    for text in io.BytesIO(content):
        end += len(text)
        record = _record(text)
        # A kill leaves the beginning of a line, which is left out.
        if record is not None or text.endswith(b"\n"):
            lines.append((end, record))
    return lines


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
        return None
    record.pop("crc32", None)  # of logs that were written before
    return record


def _lock(path: Path) -> int | None:
    """Opens and locks the file; returns None if another process has removed it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except BlockingIOError:
        owner = _owner_in(descriptor) or {"pid": "unknown", "host": "this host"}
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


def _owner(content: bytes) -> dict | None:
    try:
        owner = json.loads(content)
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _owner_in(descriptor: int) -> dict | None:
    try:
        return _owner(os.pread(descriptor, _MOST_OWNER, 0))
    except OSError:
        return None
