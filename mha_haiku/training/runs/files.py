"""Files of a run: written whole or not at all, logs, links, and the lock of a folder.

A log has a JSON object per line. It is only appended to and truncated, never rewritten,
so that a kill loses no line. Of several processes only the first writes.
"""

import contextlib
import errno
import fcntl
import hashlib
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


def sha256_of(contents: Mapping[str, Any]) -> str:
    """Computes the sha256 of the content of a JSON file."""
    text = json.dumps(contents, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a log, in order; warns of damaged lines, and omits them."""
    records = []
    for number, line in enumerate(_lines(path), start=1):
        if (record := _record(line)) is None:
            _logger.warning(f"{path} is damaged at line {number}, which is left out.")
        else:
            records.append(record)
    return records


class LineWriter(contextlib.AbstractContextManager):
    """Appends records to a log, each in one write."""

    def __init__(self, path: Path, *, last_step: int | None = None):
        """Opens or creates the log; cuts off records of a "step" after `last_step`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = checks.regular_file(path).open("ab", buffering=0)
            end = 0
            for line in _lines(path):
                step = (_record(line) or {}).get("step", -1)
                if last_step is not None and step > last_step:
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


def check_links(root: Path) -> None:
    """Raises ConfigError if a link in a folder leaves it: others would be written."""
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise ConfigError(
                    f"{path} is a link that leaves the run's folder, to "
                    f"{path.resolve()}.\nReplace it by what it links to."
                )


def make_folder(name: str, path: str | os.PathLike) -> Path:
    """Makes a folder if it is missing; ConfigError if files cannot be written there."""
    root = checks.as_path(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{name} {root} cannot be written: {error.strerror}."
        ) from None
    return root


@contextlib.contextmanager
def not_left_empty(path: str | os.PathLike) -> Iterator[None]:
    """Removes on exit the folders that were made while entered and are empty."""
    root = checks.as_path(path)
    missing = [each for each in (root, *root.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # it holds something
                each.rmdir()


def check_writable(name: str, path: str | os.PathLike) -> None:
    """Raises the errors of `make_folder` on all processes, and leaves no folder."""

    def check() -> None:
        with not_left_empty(path):
            make_folder(name, path)

    cluster.first_does(check)


def beside(workdir: str | os.PathLike, suffix: str) -> Path:
    """Names the folder next to a run's, "sort_pruned" for "sort" and "_pruned"."""
    root = Path(os.path.abspath(checks.as_path(workdir)))
    return root.with_name(root.name + suffix)


def _lines(path: Path) -> list[bytes]:
    """Reads the whole lines of a log; a kill leaves the beginning of another."""
    try:
        content = checks.whole_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    lines = content.splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _record(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step", 0)) is int
    return record if is_record else None
