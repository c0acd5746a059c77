"""Where files may be written: folders that are made, or tried, before the work."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError


def made(name: str, path: str | os.PathLike) -> Path:
    """Makes a folder if it is missing, and returns its path.

    Raises:
      ConfigError: With `name`, if files cannot be written there.
    """
    root = checks.as_path(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        why = None if os.access(root, os.W_OK | os.X_OK) else "no permission"
    except (FileExistsError, NotADirectoryError):
        why = "it must be a folder, and a file is there"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise ConfigError(f"{name} {root} cannot be written: {why}.")
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
    """Raises the errors of `made`, and leaves a missing folder missing."""
    with not_left_empty(path):
        made(name, path)


def beside(workdir: str | os.PathLike, suffix: str) -> Path:
    """Names the folder next to a run's, "sort_pruned" for "sort" and "_pruned"."""
    root = checks.as_path(workdir)
    if root.name in ("", ".."):  # "." too
        root = root.resolve()
    return root.parent / f"{root.name}{suffix}"
