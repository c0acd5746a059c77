"""manifest.json, which verifies a checkpoint: the sha256 of each of its files.

A checkpoint must match its manifest: no file changed, cut short, missing or added, and
no folder or link instead of a file.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mha_haiku.core import checks, fields

NAME = "manifest.json"
_MOST_BYTES = 2**26  # of a manifest; a larger file is damage


class DamageError(Exception):
    """A checkpoint differs from what was written; the message names the difference."""


class Manifest(NamedTuple):
    """The content of manifest.json."""

    step: int
    held_out_loss: float | None
    # "dtype" and "shape" of each array, by its name.
    arrays: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, str]  # sha256 of each file, by its name


class _Described(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


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
    text = json.dumps(manifest._asdict(), indent=1, allow_nan=False)
    (folder / NAME).write_text(text, encoding="utf-8")
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
        contents = json.loads(path.read_bytes())
        contents.pop("sha256", None)  # of manifests that were written before
        manifest = _read_contents(contents)
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
            size, most = (folder / name).stat().st_size, checks.memory()
            if size > most:
                raise checks.ConfigError(
                    f"{folder / name} has {size:,} bytes, and this machine has "
                    f"{most:,} of memory."
                )
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


def _read_contents(contents) -> Manifest:
    manifest = fields.decoded(Manifest, contents, "")
    checks.non_negative_integer("step", manifest.step)
    if manifest.held_out_loss is not None:
        checks.number("held_out_loss", manifest.held_out_loss)
    for name, digest in manifest.files.items():
        is_name = name == os.path.basename(name) and name not in ("", ".", "..", NAME)
        if not is_name or len(digest) != 64:
            raise ValueError("files must be names with a sha256")
    for name, described in manifest.arrays.items():
        fields.decoded(_Described, described, name)
        for size in described["shape"]:
            checks.integer_in(name, size, 0, 2**63)
    return manifest


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
