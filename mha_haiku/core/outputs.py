"""Output folders of commands, in which no file of anyone else is overwritten.

A folder lists by name, in the file `.mha_haiku`, what commands have written there.
Hidden files do not count: no command writes another one.
"""

import os
from collections.abc import Iterable

from mha_haiku.core import checks

LIST = ".mha_haiku"


def check(name: str, folder: str | os.PathLike) -> None:
    """Checks that a command may write to a folder; call it before the work.

    The folder must be empty, or hold only what commands have written. A missing folder
    passes, too, and a path that is none, where writing fails.

    Raises:
      ConfigError: With `name`, the name of the folder's flag, if it holds anything else
        or cannot be read.
    """
    root = checks.as_path(folder)
    try:
        entries = {path.name for path in root.iterdir() if path.name[0] != "."}
        others = entries - names(root)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise checks.ConfigError(
            f"{name} {root} cannot be read: {error.strerror}."
        ) from None
    if others:
        raise checks.ConfigError(
            f"{name} {root} must be a new or empty folder, or hold only what a command "
            f"has written, got one with {checks.shown(min(others))}.\n"
            f"Choose another folder; or, if these may be replaced: ls {root} > "
            f"{root / LIST}"
        )


def claim(folder: str | os.PathLike, written: Iterable[str]) -> None:
    """Lists names of files that are about to be written in a folder."""
    root = checks.as_path(folder)
    before = names(root)
    if after := set(written) - before:
        lines = sorted(before | after)
        checks.write_file(root / LIST, "".join(f"{line}\n" for line in lines))


def names(folder: str | os.PathLike) -> set[str]:
    """Returns the names of the files that commands have written in a folder."""
    path = checks.as_path(folder) / LIST
    return set(checks.text_of(path, path).splitlines()) if path.is_file() else set()
