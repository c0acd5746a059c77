"""Files of a run: written whole or not at all, logs, and the lock of a folder.

A log has a JSON object per line. It is only appended to and truncated, never rewritten,
so that a kill loses no line. Of several processes only the first writes.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mha_haiku.core import arrays, checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.training.devices import cluster

_logger = logging.getLogger("mha_haiku")


class SaveError(RuntimeError):
    """A file of a run could not be written; what was saved before is unchanged."""


def write(
    path: str | os.PathLike, content: str | bytes | Callable[[BinaryIO], Any]
) -> Path:
    """Writes a file whole, on the first process only; see `checks.write_file`."""
    if not cluster.is_first():
        return checks.as_path(path)
    return checks.write_file(path, content)


def write_json(path: str | os.PathLike, contents: Mapping[str, Any]) -> Path:
    """Writes a JSON object; see `write`."""
    return write(path, json.dumps(contents, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object in a JSON file, or None if there is no file."""
    return arrays.read_json(path) if os.path.lexists(path) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log, in order; ConfigError if a line is damaged."""
    try:
        return list(map(json.loads, _lines(path)))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from None


class LineWriter(contextlib.AbstractContextManager):
    """Appends records to a log, each in one write."""

    def __init__(self, path: Path, *, last_step: int | None = None):
        """Opens or creates the log; cuts off records of a "step" after `last_step`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            end = 0
            for line in _lines(path):
                if last_step is not None and json.loads(line)["step"] > last_step:
                    break
                end += len(line)
            self._file.truncate(end)  # and a line that a kill has cut off
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record; SaveError, with the log as before, if that fails."""
        line = json.dumps(record).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(None, "No space left on device")
        except OSError as error:
            self._file.truncate(end)
            name, why = self._file.name, error.strerror
            raise SaveError(f"{name} cannot be written: {why}.") from None

    def sync(self) -> None:
        """Waits until all records are on the disk itself."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a folder while entered; ConfigError if it is in use.

    The lock is on a file `path` in it that is never replaced. The kernel holds it
    (`flock`) and releases it when the process ends, also by a kill.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"workdir {path.parent} is in use: another process trains in it.\n"
                "Wait for its end, or take another workdir."
            ) from None
        except OSError as error:  # a file system without locks
            _logger.warning(
                f"{path.parent} cannot be locked ({error.strerror}): make sure that "
                "only one process trains in it."
            )
        yield


def check_writable(name: str, path: str | os.PathLike) -> None:
    """Calls `check_writable_here` on the first process; all raise what it raises."""
    cluster.first_does(lambda: check_writable_here(name, path))


def check_writable_here(name: str, path: str | os.PathLike) -> None:
    """Raises ConfigError unless files can be written to a folder, missing or not."""
    root = checks.as_path(path).absolute()
    above = next(each for each in (root, *root.parents) if os.path.lexists(each))
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        code = errno.EACCES if above.is_dir() else errno.ENOTDIR
        raise ConfigError(f"{name} {root} cannot be written: {os.strerror(code)}.")


def beside(workdir: str | os.PathLike, suffix: str) -> Path:
    """Names the folder next to a run's, "sort_pruned" for "sort" and "_pruned"."""
    root = Path(os.path.abspath(checks.as_path(workdir)))
    return root.with_name(root.name + suffix)


def _lines(path: Path) -> list[bytes]:
    """Reads the whole lines of a log; a kill leaves the beginning of another."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    lines = content.splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]
