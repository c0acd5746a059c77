"""manifest.json, which verifies a checkpoint: the sha256 of each of its files.

A checkpoint must match its manifest: no file changed, cut short, missing or added, and
no folder or link in place of a file. The manifest contains its own sha256 too.
"""

import functools
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

NAME = "manifest.json"
_MOST_BYTES = 2**26  # of a manifest; a larger file is damage


class DamageError(Exception):
    """A checkpoint differs from what was written; the message names the difference."""


class Manifest(NamedTuple):
    """The content of manifest.json."""

    step: int
    held_out_loss: float | None
    arrays: dict[str, dict[str, Any]]  # "dtype" and "shape" of each array, by its name
    files: dict[str, str]  # sha256 of each file, by its name


def write(
    folder: Path,
    *,
    step: int,
    held_out_loss: float | None,
    arrays: dict[str, dict[str, Any]],
) -> None:
    """Writes the manifest of the files in `folder`, and flushes all of them to disk."""
    files = {name: _digest(folder / name) for name in _names(folder)}
    manifest = Manifest(step, held_out_loss, arrays, files)
    (folder / NAME).write_text(_text(manifest._asdict()), encoding="utf-8")
    for name in (*files, NAME):
        _to_disk(folder / name)
    _to_disk(folder)


def read(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, without checking the files."""
    path = folder / NAME
    if folder.is_symlink():
        raise DamageError("it is a link")
    if not folder.is_dir():
        raise DamageError("it is not a folder")
    if path.is_symlink() or not path.is_file():
        raise DamageError(f"it has no {NAME}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError
        text = path.read_bytes().decode("utf-8")
        contents = json.loads(text)
        del contents["sha256"]
        if text != _text(contents) or set(contents) != set(Manifest._fields):
            raise ValueError
        manifest = Manifest(**contents)
        _check_types(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamageError(f"{NAME} is damaged") from None
    return manifest


def check(folder: Path) -> Manifest:
    """Checks all files of a checkpoint, and returns its manifest."""
    manifest = read(folder)
    if folder.name != str(manifest.step):
        raise DamageError(f"{NAME} is of step {manifest.step}")
    try:
        present = set(_names(folder)) - {NAME}
        for name in sorted(present - set(manifest.files)):
            raise DamageError(f"{name} was added")
        for name, digest in sorted(manifest.files.items()):
            if name not in present:
                raise DamageError(f"{name} is missing")
            if _digest(folder / name) != digest:
                raise DamageError(f"{name} is not as it was written")
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
        raise DamageError(why) from None
    return manifest


def _names(folder) -> list[str]:
    """Lists the names of the files in a folder, which must hold nothing else."""
    paths = sorted(folder.iterdir())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise DamageError(f"{path.name} is not a file")
    return [path.name for path in paths]


def _check_types(manifest) -> None:
    loss = manifest.held_out_loss
    is_right = isinstance(manifest.step, int) and (loss is None or math.isfinite(loss))
    for name, digest in manifest.files.items():
        is_right &= name == os.path.basename(name) and len(digest) == 64
        is_right &= name not in ("", ".", "..", NAME)
    for described in manifest.arrays.values():
        is_right &= set(described) == {"dtype", "shape"}
    if not is_right:
        raise ValueError


def _text(contents) -> str:
    """Formats these contents as canonical text, with a sha256 of itself."""
    # Canonical, so that any change of the file shows, even one of white space.
    canonical = functools.partial(json.dumps, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(canonical(contents).encode()).hexdigest()
    return canonical({**contents, "sha256": digest}) + "\n"


def _digest(path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
